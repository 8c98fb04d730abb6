"""Compares chunks whose lengths adapt with chunks of fixed lengths: tokens per second, first tokens and pauses.

    python benchmarks/chunks.py [--json] [--clients 8 64] [--fixed 1 8 32] [--seconds 15] [--repeats 2]

A 7M-parameter Qwen2-shaped model with random weights, float32, in a session of a server without HTTP. Prompts have 8 to
128 tokens, completions 8 to 256 (geometric, mean 64); when one finishes, its client sends the next request at once.
Lengths take turns, so that other work on the machine concerns all of them. Admissions adapt in all of them.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, show

from groupax import Engine, SamplingParams, init_model
from groupax.engine.plan import CacheShape
from groupax.engine.programs import Pace, Programs, Serving
from groupax.engine.sequence import Sequence
from groupax.engine.session import Session

MAX_STEPS = 32


class FixedPace(Pace):
    """Chunks of one length."""

    def num_steps(self, shape: CacheShape) -> int:
        """Returns the length."""
        del shape
        return self.max_steps


def request(engine: Engine, number: int) -> list[Sequence]:
    """Returns the request of a number."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(1, 8000, rng.integers(8, 129)).astype(np.int32)
    max_tokens = int(np.clip(rng.geometric(1 / 64), 8, 256))
    return engine.sequences([prompt], SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True))


def load(engine: Engine, programs: Programs, pace: Pace, num_clients: int, seconds: float) -> dict[str, Any]:
    """Measurements of clients that each have one request at a time."""
    session, number = Session(engine, 32, partial(Serving, programs, pace=pace)), 0
    last_s: dict[int, float] = {}
    first_s: list[float] = []
    pauses_s: list[float] = []
    num_tokens = 0

    def send() -> None:
        nonlocal number
        [sequence] = request(engine, number)
        number += 1
        last_s[id(sequence)] = time.perf_counter()
        session.submit([sequence])

    begun_s = time.perf_counter()
    for _ in range(num_clients):
        send()
    while (now_s := time.perf_counter()) < begun_s + seconds:
        step_s, pace.device_s = now_s, 0.0
        grown = list(session.step())
        now_s = time.perf_counter()
        for sequence, num_new in grown:
            (first_s if len(sequence.tokens) == num_new else pauses_s).append(now_s - last_s[id(sequence)])
            last_s[id(sequence)] = now_s
            num_tokens += num_new
            if sequence.finish_reason:
                del last_s[id(sequence)]
                send()
        pace.add_host(time.perf_counter() - step_s - pace.device_s)
    return {"tokens/s": num_tokens / seconds, "first": first_s, "pauses": pauses_s}


def main() -> None:
    """Prints a row for each number of clients and each way to choose lengths."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    flags.add_argument("--clients", type=int, nargs="+", default=[8, 64])
    flags.add_argument("--fixed", type=int, nargs="+", default=[1, 8, 32])
    flags.add_argument("--seconds", type=float, default=15)
    flags.add_argument("--repeats", type=int, default=2)
    arguments = flags.parse_args()
    model = init_model(QWEN_7M, dtype="float32")
    engine = Engine(model.config, model.params, model.mesh, (), max_slots=64, chunk_steps=MAX_STEPS, kv_bytes=1 << 30)
    programs = Programs(engine, lambda: None)
    paces: dict[str, Callable[[], Pace]] = {"adapts": lambda: Pace(MAX_STEPS)}
    paces |= {str(length): lambda length=length: FixedPace(length) for length in arguments.fixed}
    rows = []
    for num_clients in arguments.clients:
        num_compiled = -1
        while num_compiled != programs.num_compiled:
            num_compiled = programs.num_compiled
            load(engine, programs, Pace(MAX_STEPS), num_clients, arguments.seconds)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in paces}
        for _ in range(arguments.repeats):
            for name, pace in paces.items():
                found[name].append(load(engine, programs, pace(), num_clients, arguments.seconds))
        for name, each in found.items():
            first, pauses = ([s for one in each for s in one[key]] for key in ("first", "pauses"))
            row = {"clients": num_clients, "chunks": name, "tokens/s": statistics.mean(e["tokens/s"] for e in each)}
            row |= {"first p50 s": float(np.percentile(first, 50)), "first p99 s": float(np.percentile(first, 99))}
            rows.append({**row, "pause p50 s": float(np.percentile(pauses, 50)) if pauses else float("nan")})
    programs.close()
    show(rows, arguments.json)


if __name__ == "__main__":
    main()
