"""Memory of decoding against its plan: many long rows on the shape of Qwen2.5-0.5B.

    python benchmarks/memory.py [--json] [--rows 64] [--prompt_tokens 1920] [--new_tokens 128]

First all rows at once, each with a prompt of its own, under a budget for keys and values that just holds them; then a
quarter of the rows under a budget for a few of them, so that the others wait. The plan is the budget and what the
compiled programs say that they need beside it; measured is the growth of the process's resident memory, from before the
first prompt to the peak. It takes long on a CPU: most of it is the prompts.
"""

import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_05B, parser, show

from groupax import Engine, Model, SamplingParams, init_model
from groupax.engine.plan import CACHE_COLUMNS, PREFILL_COLUMNS, CacheShape, Plan, bucket
from groupax.engine.programs import Tracer


def resident_peak_bytes(reset: bool = False) -> int:
    """The process's largest resident memory since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def case(name: str, model: Model, rows: int, at_once: int, args: Any) -> dict[str, Any]:
    """Decode `rows` rows under a budget for `at_once` of them."""
    engine = Engine(model.config, model.params, model.mesh, eos_ids=())
    engine.generate([np.zeros(32, np.int32)], SamplingParams(max_tokens=2))  # compiles
    columns = bucket(args.new_tokens, CACHE_COLUMNS)
    shape = CacheShape(at_once, 1, bucket(args.prompt_tokens, PREFILL_COLUMNS), columns)
    num_tokens = Plan(0, model.config.num_layers, 256).planned_tokens(shape)
    engine.kv_bytes = num_tokens * engine.bytes_per_token
    tracer = Tracer(model.config, model.mesh, model.params, jnp.float32, engine.chunk_steps)
    programs = tracer.decode_chunk(shape, "plain"), tracer.admit(shape)
    needs: list[Any] = [traced.lower().compile().memory_analysis() for traced in programs]
    temporaries = max(memory.temp_size_in_bytes for memory in needs)
    prompts = list(np.random.default_rng(0).integers(0, 8000, (rows, args.prompt_tokens)).astype(np.int32))
    before = resident_peak_bytes(reset=True)
    started_s = time.perf_counter()
    groups = engine.generate(prompts, SamplingParams(max_tokens=args.new_tokens))
    seconds = time.perf_counter() - started_s
    measured = resident_peak_bytes() - before
    return {
        "case": name,
        "finished": sum(len(group[0].tokens) == args.new_tokens for group in groups),
        "kv_budget_gb": engine.kv_bytes / 1e9,
        "temporaries_gb": temporaries / 1e9,
        "measured_gb": measured / 1e9,
        "over_plan": measured / (engine.kv_bytes + temporaries),
        "seconds": seconds,
    }


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--rows", type=int, default=64)
    flags.add_argument("--prompt_tokens", type=int, default=1920)
    flags.add_argument("--new_tokens", type=int, default=128)
    args = flags.parse_args()
    model = init_model(QWEN_05B, seed=0)
    few = max(2, args.rows // 16)
    results = [
        case(f"{args.rows} rows at once", model, args.rows, args.rows, args),
        case(f"{args.rows // 4} rows, {few} at once", model, args.rows // 4, few, args),
    ]
    show(results, args.json)


if __name__ == "__main__":
    main()
