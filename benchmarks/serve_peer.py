"""`groupax serve` beside `transformers serve`: the same clients, model and prompts, one server after the other.

    python benchmarks/serve_peer.py [--json] [--seconds 60] [--warm_up_s 60] [--clients 64]

A 7M-parameter Qwen2-shaped model with random weights, float32. Prompts are texts of 8 to 128 tokens, completions have 8
to 256 tokens (geometric, mean 64), greedy. transformers serves with and without continuous batching; it needs fastapi.
A request of either server is the same JSON. Clients and server share the cores.
"""

import argparse
import http.client
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, show

from groupax.satellites.launch.program import free_port

READY_S = 120


@dataclass
class Seen:
    """What the clients have seen of one server."""

    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    answers: list[tuple[float, float, int]] = field(default_factory=list)  # ended, seconds, completion tokens
    faults: list[str] = field(default_factory=list)


def client(port: int, model: str, seen: Seen, until_s: float) -> None:
    """Ask until the time is over."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    while time.monotonic() < until_s:
        rng = np.random.default_rng(next(seen.numbers))
        prompt = " ".join(map(str, rng.integers(1, 8000, rng.integers(8, 129))))
        body = {"model": model, "prompt": prompt, "max_tokens": int(np.clip(rng.geometric(1 / 64), 8, 256))}
        begun_s = time.monotonic()
        try:
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps({**body, "temperature": 0.0}),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise ValueError(f"{response.status}: {answer[:200]!r}")
            num_tokens = json.loads(answer)["usage"]["completion_tokens"]
        except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
            seen.faults.append(repr(error))
            connection.close()
            time.sleep(1)
            continue
        seen.answers.append((time.monotonic(), time.monotonic() - begun_s, num_tokens))
    connection.close()


def write_model(folder: Path) -> None:
    """The model, with a tokenizer whose words are numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    from groupax import init_model, save_model

    words = Tokenizer(WordLevel({"<unk>": 0, **{str(number): number for number in range(1, 8192)}}, "<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")
    save_model(init_model(QWEN_7M, dtype="float32"), folder, tokenizer)


@contextmanager
def running(command: list[str], port: int, log: Path, added: Mapping[str, str] | None = None) -> Iterator[None]:
    """A server in another process, with variables added to its environment, once it answers at /health."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(added or {})}
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as server:
        try:
            until_s = time.monotonic() + READY_S
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > until_s:
                    file.flush()
                    raise RuntimeError(f"{' '.join(command)} does not answer: {log.read_text()[-2000:]}")
                time.sleep(0.5)
            yield
        finally:
            server.kill()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def measure(name: str, port: int, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row of the table."""
    seen = Seen()
    begun_s = time.monotonic() + arguments.warm_up_s
    until_s = begun_s + arguments.seconds
    threads = [
        threading.Thread(target=client, args=(port, model, seen, until_s), daemon=True)
        for _ in range(arguments.clients)
    ]
    for thread in threads:
        thread.start()
    time.sleep(max(0, until_s - time.monotonic()))
    counted = [answer for answer in seen.answers if begun_s <= answer[0] <= until_s]
    seconds = [answer[1] for answer in counted] or [float("nan")] * 2
    row = {
        "who": name,
        "completions": len(counted),
        "tokens/s": sum(answer[2] for answer in counted) / arguments.seconds,
        "p50 s": statistics.median(seconds),
        "faults": len(seen.faults),
    }
    print(row, seen.faults[:1], flush=True)
    return row


def main() -> None:
    """Print a row for each server."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    flags.add_argument("--seconds", type=float, default=60)
    flags.add_argument("--warm_up_s", type=float, default=60)
    flags.add_argument("--clients", type=int, default=64)
    arguments = flags.parse_args()
    python = sys.executable
    peer = [str(Path(python).parent / "transformers"), "serve"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_model(folder)
        model = str(folder)
        of_peer = [*peer, model, "--device", "cpu", "--dtype", "float32", "--port"]
        servers = [
            ("groupax serve", [python, "-m", "groupax", "serve", "--model", model, "--chunk_steps", "8", "--port"]),
            ("transformers serve", of_peer),
            ("transformers serve --continuous-batching", [*of_peer[:2], "--continuous-batching", *of_peer[2:]]),
        ]
        rows = []
        for index, (name, command) in enumerate(servers):
            port = free_port("127.0.0.1")
            with running([*command, str(port)], port, Path(temporary) / f"{index}.log"):
                rows.append(measure(name, port, model, arguments))
    show(rows, arguments.json)


if __name__ == "__main__":
    main()
