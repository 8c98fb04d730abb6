"""Bytes that a step of decoding moves on a v5e that is absent: python benchmarks/tpu_decode.py [--layers 2] [--json]

They are those that XLA counts, of the program as it runs and of the same program compiled without a place for arrays in
the chip's own memory. In the first one, weights that are prefetched into that memory count up to four times, and so
does what never leaves it, so that only the second one can be compared with what a step has to read: all weights, keys
and values once. libtpu has to be in build/libtpu (see `groupax plan --help`).
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN3_06B, QWEN_05B

from groupax.satellites.planning.devices import find_target, prepare

LIBTPU = Path(__file__).parents[1] / "build" / "libtpu"
MODELS = {"Qwen2.5-0.5B": QWEN_05B, "Qwen3-0.6B": QWEN3_06B}
TARGET = "v5e-1"
NO_PLACEMENT = {"xla_vf_vmem_memory_space_assignment": "false"}


def measure(model: Mapping[str, Any], layers: int | None, rows: int) -> dict[str, float]:
    """Compiles the decode program of a rollout with 8 completions per prompt of 512 tokens, each of 1,024 tokens.

    Args:
        model: The model's config.
        layers: Number of layers; None for those of the model.
        rows: Number of completions.
    """
    from groupax import GRPOConfig
    from groupax.models.families import read_config
    from groupax.parallel.mesh import make_mesh
    from groupax.satellites.planning.abstract import device_bytes
    from groupax.satellites.planning.run import trace_run

    config = read_config({**model, "num_hidden_layers": layers or model["num_hidden_layers"]})
    target = find_target(TARGET)
    args = GRPOConfig(num_generations=8, prompts_per_step=rows // 8, max_prompt_length=512, max_completion_length=1024)
    assert target.chip is not None, "a TPU is known"
    run = trace_run(config, make_mesh(devices=target.devices), args, None, target.chip.memory_bytes)
    [program] = [program for program in run.programs if program.name == "decode_chunk"]
    lowered = program.traced.lower()
    started_s = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - started_s
    without = lowered.compile(compiler_options=NO_PLACEMENT)
    return {
        "layers": config.num_layers,
        "compile_s": seconds,
        "needed_bytes": device_bytes(program.arguments),
        "counted_bytes": compiled.cost_analysis()["bytes accessed"],
        "counted_without_placement_bytes": without.cost_analysis()["bytes accessed"],
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--models", nargs="+", choices=list(MODELS), default=["Qwen2.5-0.5B"])
    flags.add_argument("--layers", type=int, help="number of layers (default: the model's)")
    flags.add_argument("--rows", type=int, default=64, help="number of completions, a multiple of 8")
    flags.add_argument("--json", action="store_true", help="print JSON instead of sentences")
    args = flags.parse_args()
    prepare(TARGET, LIBTPU)
    for name in args.models:
        numbers = measure(MODELS[name], args.layers, args.rows)
        if args.json:
            print(json.dumps({"model": name, **numbers}))
            continue
        needed = numbers["needed_bytes"]
        print(
            f"{name}, {numbers['layers']} layers, {args.rows} rows on {TARGET}: compiled in "
            f"{numbers['compile_s']:.0f} s; weights, keys and values {needed / 1e6:,.0f} MB; counted "
            f"{numbers['counted_without_placement_bytes'] / 1e6:,.0f} MB, "
            f"{numbers['counted_without_placement_bytes'] / needed:.2f} times that; as it runs "
            f"{numbers['counted_bytes'] / 1e6:,.0f} MB; temporary {numbers['temporary_bytes'] / 1e6:,.0f} MB"
        )


if __name__ == "__main__":
    main()
