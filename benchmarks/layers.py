"""How near a step's gradients come to the machine's matrix products: in the layers' products, in the layers, in all.

    python benchmarks/layers.py [--json] [--long_tailed]

The 7M-parameter model and rows of `benchmarks/step.py`: 4 prompts of 192 tokens, 8 completions each of 128 tokens, or
with --long_tailed of up to 512, ending at each token with a chance of 1 / 128. Timed are forward and backward passes
of a step's micro-batches: without attention and vocabulary, with attention, and whole. Operations are those that the
model needs (two per weight and token, four per head dim and visible column; the backward pass twice as many), and the
ceiling is what square matrix products reach in the same dtype on all cores, measured.
"""

import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, parser, show
from step import DTYPES, GROUP, LONGEST_TOKENS, MEAN_TOKENS, NEW_TOKENS, PROMPT_TOKENS, PROMPTS

from groupax import GRPOConfig, init_model
from groupax.models.flops import forward_flops
from groupax.objective.aggregation import Denominators
from groupax.parallel.memory import peak_flops
from groupax.parallel.mesh import num_data_shards
from groupax.runs.build import learner_settings
from groupax.training.batch import pack
from groupax.training.learner import Learner
from groupax.training.step import micro_step, shard_batch, zero_grads
from groupax.types import Row

ROUNDS = 7


def a_step(long_tailed: bool) -> list[Row]:
    """The rows of one step, with random tokens."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(PROMPTS):
        prompt = rng.integers(1, 8000, PROMPT_TOKENS)
        for _ in range(GROUP):
            length = min(LONGEST_TOKENS, rng.geometric(1 / MEAN_TOKENS)) if long_tailed else NEW_TOKENS
            tokens, logps = rng.integers(1, 8000, length), np.full(length, -9.0, np.float32)
            mask, advantages = np.ones(length, bool), np.full(length, rng.normal(), np.float32)
            rows.append(Row(group, prompt, tokens, mask, advantages, logps, ref_logp=logps))
    return rows


def no_attention(q: Any, k: Any, v: Any, *_: Any) -> Any:
    """What takes next to nothing, and needs all three."""
    T = q.shape[1]
    return q + jnp.repeat(k[:, -T:] + v[:, -T:], q.shape[2] // k.shape[2], axis=2)


def no_vocabulary(hidden: Any, *_: Any) -> tuple[Any, Any]:
    """In the place of log-probs and entropies."""
    logp = hidden.astype(jnp.float32).mean(axis=-1)
    return logp, jax.lax.stop_gradient(logp)


PARTS: dict[str, dict[str, Any]] = {
    "products of layers": {"attend": no_attention, "attend_with_prompt": no_attention, "token_logprobs": no_vocabulary},
    "layers": {"token_logprobs": no_vocabulary},
    "whole": {},
}


def median_seconds(learner: Learner, rows: list[Row], replaced: dict[str, Any]) -> float:
    """Of all micro-batches' forward and backward passes, with functions of `models.logprobs` replaced."""
    settings, mesh = learner.settings, learner.mesh
    parts = pack(rows, num_data_shards(mesh), learner.micro_batch_tokens, longest=learner.longest)[0]
    batches = [shard_batch(part.batch, mesh) for part in parts]
    static: dict[str, Any] = {"config": learner.config, "settings": settings.objective, "mesh": mesh}
    counts = Denominators(jnp.float32(len(rows)), jnp.float32(sum(len(row.completion) for row in rows)))
    seconds = []
    with ExitStack() as patches:
        for name, function in replaced.items():
            patches.enter_context(patch(f"groupax.models.logprobs.{name}", function))
        jax.clear_caches()  # programs of other parts
        for _ in range(1 + ROUNDS):  # the first one compiles
            totals = jax.block_until_ready(zero_grads(learner.policy, **static))
            started_s = time.perf_counter()
            for batch in batches:
                totals, _ = micro_step(
                    learner.policy, totals, batch, counts, jnp.float32(0), **static, execution=learner.execution
                )
            jax.block_until_ready(totals)
            seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds[1:])


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--long_tailed", action="store_true")
    args = flags.parse_args()
    rows = a_step(args.long_tailed)
    lengths = [len(row.completion) for row in rows]
    model = init_model(QWEN_7M, seed=0)
    # a token that sees itself alone has no attention to speak of
    alone = [(1, [])] * (PROMPTS * PROMPT_TOKENS) + [(0, [1])] * sum(lengths)
    groups = [(PROMPT_TOKENS, lengths[first : first + GROUP]) for first in range(0, len(rows), GROUP)]
    vocabulary = 2.0 * model.config.vocab_size * model.config.hidden_size * sum(lengths)
    all_flops = forward_flops(model.config, groups)
    flops = dict(
        zip(PARTS, (forward_flops(model.config, alone) - vocabulary, all_flops - vocabulary, all_flops), strict=True)
    )
    results = []
    for dtype in DTYPES:
        config = GRPOConfig(max_completion_length=max(lengths), beta=0.04, dtype=dtype)
        learner = Learner(model, learner_settings(config), 100, (PROMPT_TOKENS, max(lengths)))
        ceiling = peak_flops(learner.mesh, learner.dtype)
        for name, replaced in PARTS.items():
            seconds = median_seconds(learner, rows, replaced)
            reached = 3 * flops[name] / seconds
            results.append(
                {
                    "dtype": dtype,
                    "part": name,
                    "seconds": seconds,
                    "GFLOP/s": reached / 1e9,
                    "of": ceiling / 1e9,
                    "share": reached / ceiling,
                }
            )
    show(results, args.json)


if __name__ == "__main__":
    main()
