"""How near decoding comes to what the machine can do, and where the rest of a step goes.

    python benchmarks/roofline.py [--json] [--cases 32 128 0.5B]

Prompts of 192 tokens in groups of 8. A step's floating-point operations and the bytes that it must read (weights once
per device, a prompt's keys and values once per place, a row's own) are counted; the ceilings are measured: square
matrix products, and sums over memory that no cache holds, on all cores. The bound is the larger of the two quotients.
Then the step is timed in parts: layers without attention, with attention, with the vocabulary's head, and all with
sampling.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_05B, QWEN_7M, parser, read_bytes_per_s, show

from groupax import Engine, Model, SamplingParams, init_model
from groupax.engine.batch import Batch
from groupax.engine.cache import REPLICATED, ROWS, Cache
from groupax.models.attention import Past, attend_cached
from groupax.models.decoder import forward, head_weights
from groupax.models.flops import forward_flops
from groupax.models.layers import vocabulary_logits
from groupax.parallel.memory import peak_flops
from groupax.parallel.mesh import num_data_shards

PROMPT_TOKENS, GROUP, NEW_TOKENS, STEPS = 192, 8, 96, 32
CASES = {"32": (QWEN_7M, 32), "128": (QWEN_7M, 128), "0.5B": (QWEN_05B, 16)}


def timed_steps(model: Model, rows: int) -> tuple[float, Cache]:
    """The median seconds of a decoding step once two chunks are decoded, and the cache that it reads."""
    engine = Engine(model.config, model.params, model.mesh, eos_ids=(), chunk_steps=STEPS)
    prompts = list(np.random.default_rng(0).integers(0, 8000, (rows // GROUP, PROMPT_TOKENS)).astype(np.int32))
    seconds, caches = [], []

    class TimedBatch(Batch):
        def decode(self, params: Any) -> Any:
            jax.block_until_ready(self.cache)
            started_s = time.perf_counter()
            grown = super().decode(params)
            seconds.append((time.perf_counter() - started_s) / STEPS)
            caches[:] = [self.cache]
            return grown

    with patch("groupax.engine.session.Batch", TimedBatch):
        for seed in range(4):
            engine.generate(prompts, SamplingParams(n=GROUP, max_tokens=NEW_TOKENS, seed=seed))
    return statistics.median(seconds[5::3]), caches[0]


def part_seconds(model: Model, cache: Cache, with_attention: bool, with_head: bool) -> float:
    """Seconds of a step that does only some of the work."""
    config, mesh = model.config, model.mesh

    def local(params: Any, cache: Cache, tokens: Any) -> Any:
        full = jnp.full(tokens.shape, cache.num_columns)
        past = Past(jnp.zeros_like(cache.prompt_starts), full)

        def attend(attn: Any, kept: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
            if not with_attention:
                return q + jnp.repeat(k + v, q.shape[1] // k.shape[1], axis=1), kept
            return attend_cached(attn, past, kept, q + k[:, :1] + v[:, :1]), kept

        def step(_: Any, tokens: Any) -> Any:
            hidden = forward(config, params, tokens, tokens, attend, cache.layers).hidden
            out = vocabulary_logits(hidden, head_weights(params)) if with_head else hidden
            return jnp.abs(out[:, 0]).astype(jnp.int32) + tokens

        return lax.fori_loop(0, STEPS, step, tokens)

    specs = (REPLICATED, ROWS, ROWS)
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=False))
    tokens = jax.device_put(np.arange(cache.tokens.shape[0], dtype=np.int32), jax.NamedSharding(mesh, ROWS))
    return _median_seconds(partial(program, model.params, cache, tokens)) / STEPS


def _median_seconds(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(6):  # the first one compiles
        started_s = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds[1:])


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = flags.parse_args()
    results = []
    for name in args.cases:
        hf_config, rows = CASES[name]
        model = init_model(hf_config, seed=0)
        step_s, cache = timed_steps(model, rows)
        layers_s = part_seconds(model, cache, with_attention=False, with_head=False)
        attention_s = part_seconds(model, cache, with_attention=True, with_head=False)
        head_s = part_seconds(model, cache, with_attention=True, with_head=True)
        stored = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
        weights = sum(x.nbytes for x in jax.tree.leaves(model.params)) * num_data_shards(model.mesh)
        columns = cache.num_prompt_columns + cache.num_columns
        flops = rows * (forward_flops(model.config, [(columns, [1])]) - forward_flops(model.config, [(columns, [])]))
        flops_ceiling, bytes_ceiling = peak_flops(model.mesh, jnp.float32), read_bytes_per_s(jax.device_count())
        bound_s = max(flops / flops_ceiling, (weights + stored) / bytes_ceiling)
        results.append(
            {
                "case": name,
                "step_ms": step_s * 1e3,
                "GFLOP/s": flops / step_s / 1e9,
                "of": flops_ceiling / 1e9,
                "GB/s": (weights + stored) / step_s / 1e9,
                "of ": bytes_ceiling / 1e9,
                "bound_ms": bound_s * 1e3,
                "reached": bound_s / step_s,
                "layers_ms": layers_s * 1e3,
                "attention_ms": (attention_s - layers_s) * 1e3,
                "head_ms": (head_s - attention_s) * 1e3,
                "sampling_ms": (step_s - head_s) * 1e3,
            }
        )
    show(results, args.json)


if __name__ == "__main__":
    main()
