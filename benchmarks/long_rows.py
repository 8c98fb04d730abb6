"""Memory of an update over long rows: it grows with their length, not with its square.

    python benchmarks/long_rows.py [--json] [--run_up_to 4096]

The 7M-parameter model, one prompt of 64 tokens with 2 completions of 2,048 to 16,384 tokens, with
`gradient_checkpointing="full"`: what the compiled program needs beside weights and gradients, and for the shorter ones
the seconds of an update and the process's peak.
"""

import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, parser, show

from groupax import GRPOConfig, init_model
from groupax.core.types import Row
from groupax.models.execution import execution_for
from groupax.objective.aggregation import Denominators
from groupax.parallel.memory import peak_memory_bytes
from groupax.parallel.mesh import num_data_shards
from groupax.runs.build import learner_settings
from groupax.training.accumulator import zero_grads
from groupax.training.learner import Learner
from groupax.training.packing import pack
from groupax.training.step import StepSettings, micro_step, shard_batch

LENGTHS = (2048, 4096, 8192, 16_384)


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--run_up_to", type=int, default=4096, help="longest rows to run and not only to compile")
    args = flags.parse_args()
    model = init_model({**QWEN_7M, "max_position_embeddings": 32_768}, seed=0)
    settings = learner_settings(GRPOConfig(gradient_checkpointing="full", micro_batch_tokens=32_768))
    learner = Learner(model, settings, 100)
    rng = np.random.default_rng(0)
    results: list[dict[str, Any]] = []
    for length in LENGTHS:
        mask, ones = np.ones(length, bool), np.ones(length)
        rows = [
            Row(0, np.arange(64), rng.integers(1, 8000, length), mask, sign * ones, 0 * ones) for sign in (1.0, -1.0)
        ]
        [part], _ = pack(rows, num_data_shards(model.mesh), settings.micro_batch_tokens or 0)
        totals = zero_grads(model.params, config=model.config, settings=settings.objective, mesh=model.mesh)
        counts = Denominators(jnp.float32(2), jnp.float32(2 * length))
        step = StepSettings(model.config, settings.objective, model.mesh, execution_for("cpu", "full"))
        batch = shard_batch(part.batch, model.mesh)
        lowered = micro_step.lower(model.params, totals, batch, counts, jnp.float32(0), settings=step)
        memory: Any = lowered.compile().memory_analysis()
        row: dict[str, Any] = {"tokens_per_row": length, "temporaries_gb_per_device": memory.temp_size_in_bytes / 1e9}
        row |= {"update_s": None, "process_peak_gb": None}
        if length <= args.run_up_to:
            started_s = time.perf_counter()
            learner.update(rows)
            row["update_s"] = time.perf_counter() - started_s
            row["process_peak_gb"] = peak_memory_bytes(model.mesh) / 1e9
        results.append(row)
    show(results, args.json)


if __name__ == "__main__":
    main()
