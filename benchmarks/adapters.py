"""Tokens per second of several adapters in one batch, of an engine for each in turn, and of the base alone.

python benchmarks/adapters.py [--adapters 8] [--rank 16] [--rows 8] [--tokens 128] [--hidden 256] [--repeats 5]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M

from groupax import Engine, LoRAConfig, SamplingParams, add_adapter, init_model
from groupax.engine.session import Session
from groupax.models.adapted import changes_of, stack_adapters
from groupax.models.weights.checkpoint import Model

PROMPT = [np.arange(1, 17, dtype=np.int32)]
SETTINGS: dict[str, Any] = {"kv_bytes": 1 << 28, "chunk_steps": 32}


def adapters_of(base: Model, number: int, rank: int) -> list[Model]:
    """Returns adapters that change something."""

    def moved(x: jax.Array, seed: int) -> jax.Array:
        return x + 0.01 * jax.random.normal(jax.random.key(seed), x.shape)

    found = []
    for seed in range(number):
        adapter = add_adapter(base, LoRAConfig(r=rank), seed).adapter
        assert adapter is not None, "it was added"
        trained = jax.tree.map(lambda x, seed=seed: moved(x, seed), adapter.trained)
        found.append(replace(base, adapter=replace(adapter, trained=trained)))
    return found


def engine_of(base: Model, adapters: list[Model]) -> Engine:
    """Returns an engine for the base with adapters, named by their numbers."""
    if not adapters:
        return Engine(base.config, base.params, base.mesh, (), **SETTINGS)
    changes = [
        changes_of(each.adapter.trained, each.adapter.config.scale, jnp.float32) for each in adapters if each.adapter
    ]
    params = stack_adapters(base.params, changes)
    names = tuple(map(str, range(len(adapters))))
    return Engine(base.config, params, base.mesh, (), adapters=names, **SETTINGS)


def run(sessions: list[Session]) -> None:
    """Decodes a chunk of each session in turn until all have finished."""
    while any(session.busy for session in sessions):
        for session in sessions:
            list(session.step())


def measured(engines: list[Engine], names: list[list[str | None]], rows: int, tokens: int) -> Callable[[], float]:
    """Returns a function that decodes rows of each name and returns its tokens per second."""
    params = SamplingParams(n=rows, max_tokens=tokens, ignore_eos=True)

    def once() -> float:
        sessions, num_rows = [engine.session() for engine in engines], 0
        for engine, session, own in zip(engines, sessions, names, strict=True):
            for index, name in enumerate(own):
                sequences = engine.sequences(PROMPT, params, index, adapter=name)
                num_rows += len(sequences)
                session.submit(sequences)
        started_s = time.perf_counter()
        run(sessions)
        return num_rows * tokens / (time.perf_counter() - started_s)

    return once


def main() -> None:
    """Prints the medians of alternating repeats."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"adapters": 8, "rank": 16, "rows": 8, "tokens": 128, "hidden": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    base = init_model({**QWEN_7M, "hidden_size": given.hidden, "intermediate_size": 3 * given.hidden})
    adapters = adapters_of(base, given.adapters, given.rank)
    together = engine_of(base, adapters)
    apart, alone = [engine_of(base, [each]) for each in adapters], engine_of(base, [])
    counts = given.rows, given.tokens
    ways = {
        "one batch": measured([together], [list(together.adapters)], *counts),
        "in turn": measured(apart, [list(each.adapters) for each in apart], *counts),
        "base alone": measured([alone], [[None] * given.adapters], *counts),
    }
    found: dict[str, list[float]] = {name: [way()][:0] for name, way in ways.items()}  # the first compiles
    for _ in range(given.repeats):
        for name, way in ways.items():
            found[name].append(way())
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, values in found.items():
        each = " ".join(f"{value:.0f}" for value in values)
        print(f"{name:>10}: {medians[name]:.0f} tokens/s ({each})")
    print(f"one batch / in turn {medians['one batch'] / medians['in turn']:.2f}")
    print(f"one batch / base alone {medians['one batch'] / medians['base alone']:.2f}")


if __name__ == "__main__":
    main()
