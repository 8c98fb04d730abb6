"""A wait for servers to answer: python -m groupax.launch.readiness SECONDS http://host:port ..."""

import sys
import time
import urllib.request
from collections.abc import Sequence

POLL_S = 2.0


def silent_servers(addresses: Sequence[str], timeout_s: float) -> list[str]:
    """Waits until all servers answer, and returns those that have not when the time is over.

    Args:
        addresses: Addresses of servers, as http://host:port; each is asked for /health.
        timeout_s: Longest time to wait.
    """
    deadline_s = time.monotonic() + timeout_s
    silent = list(addresses)
    while True:
        silent = [address for address in silent if not _answers(address)]
        if not silent or time.monotonic() >= deadline_s:
            return silent
        time.sleep(POLL_S)


def _answers(address: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{address}/health", timeout=10) as response:
            return response.status == 200
    except OSError:
        return False


def main(timeout_s: float, addresses: Sequence[str]) -> int:
    """Returns the exit status: 0 if all servers answer."""
    silent = silent_servers(addresses, timeout_s)
    if silent:
        print(f"groupax launch: no answer in {timeout_s:g} s from {', '.join(silent)}; see its log", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
