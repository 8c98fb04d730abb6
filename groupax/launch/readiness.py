"""Wait until servers answer: python -m groupax.launch.readiness SECONDS http://host:port ..."""

import sys
import time
import urllib.request
from collections.abc import Sequence

ASK_S = 2.0


def wait_for(addresses: Sequence[str], longest_s: float) -> list[str]:
    """Those that have not answered when the time is over; none as soon as all have.

    Args:
        addresses: of servers, as http://host:port; each is asked for /health.
        longest_s: how long to wait.
    """
    until_s = time.monotonic() + longest_s
    silent = list(addresses)
    while True:
        silent = [address for address in silent if not _answers(address)]
        if not silent or time.monotonic() >= until_s:
            return silent
        time.sleep(ASK_S)


def _answers(address: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{address}/health", timeout=10) as response:
            return response.status == 200
    except OSError:
        return False


def main(longest_s: float, addresses: Sequence[str]) -> int:
    """The exit status: 0 if all answer."""
    silent = wait_for(addresses, longest_s)
    if silent:
        print(f"groupax launch: no answer in {longest_s:g} s from {', '.join(silent)}; its log says why", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
