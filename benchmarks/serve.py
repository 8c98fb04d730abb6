"""Compares a server under load with the engine alone: 256 clients on loopback request completions in a loop.

    python benchmarks/serve.py [--json] [--seconds 300] [--warm_up_s 60] [--clients 256] [--engine_requests 1000]

A 7M-parameter Qwen2-shaped model with random weights, float32. Prompts have 8 to 128 tokens, completions 8 to 256
(geometric, mean 64); half of the clients stream them. Each response must have the prompt and the length of its request.
Then an engine in this process decodes some of the same requests, which must give the same tokens. Clients and server
share the cores.
"""

import argparse
import http.client
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import KEY, QWEN_7M, served, show

from groupax import Engine, SamplingParams

ROWS = 128  # decoded at once, by server and engine
CHUNK_STEPS = 8


@dataclass(frozen=True, eq=False)
class Asked:
    """A request, which is a function of its number."""

    number: int
    prompt: list[int]
    max_tokens: int

    @classmethod
    def of(cls, number: int) -> "Asked":
        """Returns the request of a number."""
        rng = np.random.default_rng(number)
        prompt = rng.integers(1, 8000, rng.integers(8, 129)).tolist()
        return cls(number, prompt, int(np.clip(rng.geometric(1 / 64), 8, 256)))

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the request."""
        return SamplingParams(seed=self.number, max_tokens=self.max_tokens, ignore_eos=True)


@dataclass
class Load:
    """Measurements of the clients."""

    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    first_seconds: dict[int, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def client(url: str, load: Load, until_s: float, streams: bool) -> None:
    """Sends requests until a deadline."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=600)
    while time.monotonic() < until_s:
        asked = Asked.of(next(load.numbers))
        begun_s = time.monotonic()
        try:
            tokens, prompt = ask(connection, asked, streams, load, begun_s)
        except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
            load.faults.append(f"{asked.number}: {error!r}")
            connection.close()
            continue
        load.ended_s[asked.number] = time.monotonic()
        load.seconds[asked.number] = load.ended_s[asked.number] - begun_s
        load.tokens[asked.number] = tokens
        if prompt != asked.prompt or len(tokens) != asked.max_tokens:
            load.faults.append(f"{asked.number}: a response to another request")
    connection.close()


def ask(
    connection: http.client.HTTPConnection, asked: Asked, streams: bool, load: Load, begun_s: float
) -> tuple[list[int], list[int]]:
    """Returns the token ids of a completion, and those of its prompt in the response."""
    body = {"prompt": asked.prompt, "seed": asked.number, "max_tokens": asked.max_tokens, "ignore_eos": True}
    body |= {"return_token_ids": True, "stream": streams}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"{response.status}: {response.read()!r}")
    if not streams:
        [choice] = json.loads(response.read())["choices"]
        return choice["token_ids"], choice["prompt_token_ids"]
    tokens: list[int] = []
    prompt: list[int] = []
    for line in response:
        if line.startswith(b"data: {"):
            [choice] = json.loads(line[6:])["choices"]
            load.first_seconds.setdefault(asked.number, time.monotonic() - begun_s)
            tokens += choice["token_ids"]
            prompt = choice.get("prompt_token_ids", prompt)
    return tokens, prompt


def main() -> None:
    """Prints a row for the server and one for the engine."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    flags.add_argument("--seconds", type=float, default=300)
    flags.add_argument("--warm_up_s", type=float, default=60)
    flags.add_argument("--clients", type=int, default=256)
    flags.add_argument("--engine_requests", type=int, default=1000, help="requests that the engine repeats")
    arguments = flags.parse_args()
    load = Load()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        options = ("--max_concurrent_rows", str(ROWS), "--chunk_steps", str(CHUNK_STEPS))
        with served(folder, QWEN_7M, "float32", *options) as (url, pid):
            begun_s = time.monotonic() + arguments.warm_up_s
            until_s = begun_s + arguments.seconds
            threads = [
                threading.Thread(target=client, args=(url, load, until_s, bool(number % 2)))
                for number in range(arguments.clients)
            ]
            for thread in threads:
                thread.start()
            time.sleep(arguments.warm_up_s)
            memory = [memory_mb(pid)]
            for _ in range(4):
                time.sleep(arguments.seconds / 4)
                memory.append(memory_mb(pid))
            for thread in threads:
                thread.join()
        counted = [number for number, ended_s in load.ended_s.items() if begun_s <= ended_s <= until_s]
        rate = sum(len(load.tokens[number]) for number in counted) / arguments.seconds
        engine = Engine.load(folder, max_slots=ROWS, chunk_steps=CHUNK_STEPS)
        rows = [
            {
                "who": f"server, {arguments.clients} clients",
                "completions": len(counted),
                "tokens/s": rate,
                **percentiles("whole", [load.seconds[number] for number in counted]),
                **percentiles("first", [load.first_seconds[n] for n in counted if n in load.first_seconds]),
            }
        ]
        print(f"server: {len(counted)} completions, {rate:.0f} tokens/s", flush=True)
        again = counted[: arguments.engine_requests]
        engine_tokens_per_s = engine_rate(engine, load, again)
    rows.append(
        {**dict.fromkeys(rows[0], ""), "who": "engine", "completions": len(again), "tokens/s": engine_tokens_per_s}
    )
    show(rows, arguments.json)
    print(f"memory of the server after warm-up and each quarter, MB: {', '.join(f'{each:.0f}' for each in memory)}")
    print(f"server / engine: {rate / engine_tokens_per_s:.2f}; faults: {len(load.faults)} {load.faults[:3]}")


def memory_mb(pid: int) -> float:
    """Returns the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1e3


def percentiles(name: str, seconds: list[float]) -> dict[str, Any]:
    """Returns percentiles of latencies."""
    cuts = statistics.quantiles(seconds, n=100)
    return {f"{name} p{part} s": cuts[part - 1] for part in (50, 95, 99)}


def sequences_of(engine: Engine, numbers: list[int]) -> list[Any]:
    """Returns unstarted sequences, each as if its request were the only one."""
    sequences = []
    for index, asked in enumerate(map(Asked.of, numbers)):
        [sequence] = engine.sequences([np.array(asked.prompt, np.int32)], asked.params)
        sequence.prompt_index = index
        sequences.append(sequence)
    return sequences


def engine_rate(engine: Engine, load: Load, numbers: list[int]) -> float:
    """Returns the tokens per second of the engine after compilation; its completions must equal the server's."""
    list(engine.stream(sequences_of(engine, numbers)))
    sequences = sequences_of(engine, numbers)
    begun_s = time.perf_counter()
    count = sum(len(sequence.tokens) for sequence in engine.stream(sequences))
    seconds = time.perf_counter() - begun_s
    for number, sequence in zip(numbers, sequences, strict=True):
        if load.tokens[number] != sequence.tokens:
            load.faults.append(f"{number}: not the engine's completion")
    return count / seconds


if __name__ == "__main__":
    main()
