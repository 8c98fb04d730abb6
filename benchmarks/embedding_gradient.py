"""The gradient of an embedding: its error, and its time, beside that of plain indexing.

    python benchmarks/embedding_gradient.py [--json] [--repeats 9]

A bfloat16 table of 8,192 words, and 16,384 tokens of which one word makes up half. The error is that of its row against
float64. The times are those of a forward and backward pass through the 7M-parameter model of `models.py`, with the two
ways to look up rows taking turns; the median of the ratios counts.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, parser, show

from groupax import init_model
from groupax.models import decoder
from groupax.models.layers import lookup

WORDS, TOKENS, DIM, FREQUENT = 8192, 16_384, 256, 7


def indexed(table: jax.Array, index: jax.Array) -> jax.Array:
    """Plain indexing, whose gradient is added up in the dtype of the table."""
    return table[index]


def row_error(look_up: Callable[..., jax.Array]) -> float:
    """The relative error of the frequent word's row of the gradient."""
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random(TOKENS) < 0.5, FREQUENT, rng.integers(0, WORDS, TOKENS))
    cotangent = jnp.asarray(rng.normal(1.0, 1.0, (TOKENS, DIM)), jnp.bfloat16)
    table = jnp.zeros((WORDS, DIM), jnp.bfloat16)
    row = jax.vjp(lambda table: look_up(table, jnp.asarray(tokens)), table)[1](cotangent)[0][FREQUENT]
    exact = np.asarray(cotangent.astype(jnp.float32), np.float64)[tokens == FREQUENT].sum(axis=0)
    return float(np.linalg.norm(np.asarray(row, np.float64) - exact) / np.linalg.norm(exact))


def gradient(look_up: Callable[..., jax.Array]) -> Callable[[], Any]:
    """A compiled forward and backward pass of a model that looks rows up like this."""
    model = init_model(QWEN_7M, seed=0)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), jax.device_get(model.params))
    tokens = jax.random.randint(jax.random.key(0), (4, 1024), 0, WORDS)

    def loss(params: Any) -> jax.Array:
        hidden = decoder.causal_hidden(model.config, params, tokens, jnp.zeros(4, jnp.int32))
        return jnp.mean(jnp.square(hidden.astype(jnp.float32)))

    decoder.lookup = look_up
    program = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
    decoder.lookup = lookup
    return lambda: jax.block_until_ready(program(params))


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    ways = {"groupax": lookup, "indexing": indexed}
    programs = {name: gradient(way) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(args.repeats + 1):  # the first warms up
        for name, program in programs.items():
            started_s = time.perf_counter()
            program()
            if repeat:
                times[name].append(time.perf_counter() - started_s)
    ratio = statistics.median(a / b for a, b in zip(times["groupax"], times["indexing"], strict=True))
    rows = [
        {"lookup": name, "row_error": row_error(way), "seconds": statistics.median(times[name])}
        for name, way in ways.items()
    ]
    show([{**row, "time_ratio": ratio if row["lookup"] == "groupax" else 1.0} for row in rows], args.json)


if __name__ == "__main__":
    main()
