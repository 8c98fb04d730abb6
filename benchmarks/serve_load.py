"""Time to the first token of `groupax serve` and `transformers serve`, with 1, 8 and 64 clients, cold and warm.

    python benchmarks/serve_load.py [--json] [--clients 1 8 64] [--rounds 5] [--servers groupax transformers continuous]

A 7M-parameter Qwen2-shaped model with random weights, float32. Prompts have 8 to 128 tokens, completions 64, greedy and
streamed. All clients of a round send one request at the same time. The cold round is the first of its number of clients
after the server says that it is ready, compiled programs are not kept from earlier starts; the warm rounds come after
all cold ones. One server runs after the other; transformers needs fastapi. Clients and server share the cores.
"""

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import show
from serve_peer import running, write_model

from groupax.satellites.launch.program import free_port

MAX_TOKENS = 64
READY_S = 600


@dataclass
class Round:
    """Measurements of requests that were sent at the same time.

    Attributes:
        first_s: Seconds to the first token of each request.
        pause_s: Longest time between two events of each response.
        seconds: Seconds to the end of all responses, by round.
        num_tokens: Number of tokens of all responses.
        faults: Requests without a whole response.
    """

    first_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    faults: list[str] = field(default_factory=list)


def stream(port: int, model: str, number: int, start: threading.Barrier, measured: Round) -> None:
    """Sends a request once all clients are there, and reads its events."""
    rng = np.random.default_rng(number)
    prompt = " ".join(map(str, rng.integers(1, 8000, rng.integers(8, 129))))
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    start.wait()
    begun_s = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        arrived_s = event_times(connection.getresponse())
    except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
        measured.faults.append(repr(error))
        return
    finally:
        connection.close()
    measured.first_s.append(arrived_s[0] - begun_s)
    measured.pause_s.append(max(np.diff(arrived_s), default=0.0))
    measured.num_tokens += MAX_TOKENS


def event_times(response: http.client.HTTPResponse) -> list[float]:
    """Returns the times at which the events with text arrive.

    Raises:
        ValueError: the response is an error, or has no text.
    """
    if response.status != 200:
        raise ValueError(f"{response.status}: {response.read()[:200]!r}")
    arrived_s = []
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event)[:200])
            if any(choice.get("text") for choice in event["choices"]):
                arrived_s.append(time.monotonic())
    if not arrived_s:
        raise ValueError("the response has no text")
    return arrived_s


def send_round(port: int, model: str, num_clients: int, first_number: int, measured: Round) -> None:
    """Sends one request of each client at the same time, and waits for the responses."""
    start = threading.Barrier(num_clients + 1)
    threads = [
        threading.Thread(target=stream, args=(port, model, first_number + index, start, measured), daemon=True)
        for index in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    start.wait()
    begun_s = time.monotonic()
    for thread in threads:
        thread.join()
    measured.seconds.append(time.monotonic() - begun_s)


def wait_until_ready(port: int) -> None:
    """Waits for /ready, which servers that lack it (404) need not say."""
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status in (200, 404):
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise RuntimeError(f"the server at port {port} is not ready after {READY_S} s")


def measure(name: str, port: int, model: str, clients: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each number of clients, first cold, then warm."""
    rows, number = [], 0
    for state, repeats in (("cold", 1), ("warm", rounds)):
        for num_clients in clients:
            measured = Round()
            for _ in range(repeats):
                send_round(port, model, num_clients, number, measured)
                number += num_clients
            rows.append(row(name, state, num_clients, measured))
            print(rows[-1], measured.faults[:1], file=sys.stderr, flush=True)
    return rows


def row(name: str, state: str, num_clients: int, measured: Round) -> dict[str, Any]:
    """Returns a row of the table."""
    first = measured.first_s or [float("nan")]
    return {
        "who": name,
        "state": state,
        "clients": num_clients,
        "first p50 s": float(np.percentile(first, 50)),
        "first p99 s": float(np.percentile(first, 99)),
        "longest pause p50 s": float(np.median(measured.pause_s or [float("nan")])),
        "tokens/s": measured.num_tokens / sum(measured.seconds),
        "faults": len(measured.faults),
    }


def main() -> None:
    """Prints the table."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    flags.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--servers", nargs="+", default=["groupax", "transformers", "continuous"])
    arguments = flags.parse_args()
    python = sys.executable
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_model(folder)
        model = str(folder)
        peer = [python, "-m", "transformers.cli.transformers", "serve"]
        of_peer = [model, "--device", "cpu", "--dtype", "float32", "--port"]
        commands = {
            "groupax": [python, "-m", "groupax", "serve", "--model", model, "--port"],
            "transformers": [*peer, *of_peer],
            "continuous": [*peer, "--continuous-batching", *of_peer],
        }
        rows = []
        for name in arguments.servers:
            port, log = free_port("127.0.0.1"), Path(temporary) / f"{name}.log"
            cache = {"XDG_CACHE_HOME": str(Path(temporary) / f"cache-{name}")}
            begun_s = time.monotonic()
            with running([*commands[name], str(port)], port, log, cache):
                wait_until_ready(port)
                print(f"{name} is ready after {time.monotonic() - begun_s:.1f} s", file=sys.stderr, flush=True)
                rows += measure(name, port, model, arguments.clients, arguments.rounds)
    show(rows, arguments.json)


if __name__ == "__main__":
    main()
