"""Estimates how fast decoding would be on an H100, from the programs that XLA compiles for one that is absent.

    python benchmarks/gpu_roofline.py [--models 0.5B 4B 7B] [--rows 64 256 1024] [--dumps FOLDER]

Nothing is run on a GPU. Prompts of 512 tokens are shared by groups of 8 rows, and rows have half of 1,024 tokens. A
decoding chunk is compiled for models with one and two layers, and its kernels are extrapolated to all layers. A kernel
takes the time of its bytes or of its operations, whichever is longer, and a latency. The range is between two sets of
assumptions:

           of bandwidth   of peak   us per kernel   us per visit of the host   results that stay on the chip
    low        0.75         0.5          2.5                  20                       none
    high       0.92         0.8          1                    10                       up to 20 MB

The bound is that of the bytes that any program has to read at the chip's full bandwidth (the weights of the layers and
of the head, and the keys and values that a row sees, prompts once per group) or of its operations at the chip's peak.
`--dumps` reads programs that XLA dumped, in a folder MODEL-ROWS-LAYERS each, instead of compiling.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN3_4B, QWEN25_7B, QWEN_05B, show

from groupax.planning.devices import find_target, prepare

if TYPE_CHECKING:  # others import jax, which `prepare` has to precede
    from groupax.planning.hlo import Instruction
    from groupax.planning.kernels import GpuProgram, Launch

MODELS = {"0.5B": QWEN_05B, "4B": QWEN3_4B, "7B": QWEN25_7B}
PROMPT, GROUP, COLUMNS, LIVE, STEPS = 512, 8, 1024, 512, 32


@dataclass(frozen=True)
class Assumptions:
    """What a GPU reaches of its figures.

    Attributes:
        bandwidth_frac: Part of the memory's bandwidth.
        flops_frac: Part of the peak of matmuls.
        kernel_s: Time between the starts of two kernels of a CUDA graph that do nothing.
        visit_s: Time for the host to read a predicate and to launch what follows.
        on_chip_bytes: Size up to which the next kernel finds a result in the cache.
    """

    bandwidth_frac: float
    flops_frac: float
    kernel_s: float
    visit_s: float
    on_chip_bytes: float


LOW = Assumptions(0.75, 0.5, 2.5e-6, 20e-6, 0.0)
HIGH = Assumptions(0.92, 0.8, 1e-6, 10e-6, 20e6)


def compiled(model: Mapping[str, Any], rows: int, layers: int) -> "GpuProgram":
    """Compiles a decoding chunk."""
    from groupax import GRPOConfig
    from groupax.models.families import read_config
    from groupax.parallel.mesh import make_mesh
    from groupax.planning.kernels import compile_for_gpu
    from groupax.planning.run import trace_run

    args = GRPOConfig(
        num_generations=GROUP,
        prompts_per_step=rows // GROUP,
        max_concurrent_rows=rows,
        max_prompt_length=PROMPT,
        max_completion_length=COLUMNS,
        micro_batch_tokens=4096,
    )
    mesh = make_mesh(devices=find_target("h100-1").devices)
    run = trace_run(read_config({**model, "num_hidden_layers": layers}), mesh, args)
    assert run.cache.num_slots == rows, run.cache
    [program] = [each for each in run.programs if each.name == "decode_chunk"]
    return compile_for_gpu(program.traced.lower())[1]


def step_seconds(program: "GpuProgram", chip: Any, assumed: Assumptions) -> float:
    """Returns the time of a token of all rows."""
    step, _ = program.work(STEPS)
    kernels_s = sum(launch.runs * _seconds(program, launch, chip, assumed) for launch in step.launches)
    return kernels_s + step.host_visits * assumed.visit_s


def _seconds(program: "GpuProgram", launch: "Launch", chip: Any, assumed: Assumptions) -> float:
    instruction = program.instruction(launch.thunk)
    if instruction is None:
        return assumed.kernel_s
    scope = program.scopes[instruction.name]
    num_bytes = 0.0
    for name, read in program.module.reads(instruction, scope).items():
        operand = scope[name]
        num_bytes += _live_frac(instruction, operand) * read if _from_memory(operand, scope, assumed) else 0.0
    written = program.module.traffic(instruction, scope)[1]
    num_bytes += written if written > assumed.on_chip_bytes else 0.0
    bytes_s = num_bytes / (assumed.bandwidth_frac * chip.memory_bytes_per_s)
    flops_s = program.module.flops(instruction, scope) / (assumed.flops_frac * chip.flops)
    return assumed.kernel_s + max(bytes_s, flops_s)


def _from_memory(operand: "Instruction", scope: Mapping[str, "Instruction"], assumed: Assumptions) -> bool:
    """Returns whether an operand is an argument of the step, such as a weight, or a result too large for the cache."""
    while operand.opcode == "bitcast":
        operand = scope[operand.operands[0]]
    is_argument = operand.opcode == "get-tuple-element" and scope[operand.operands[0]].opcode == "parameter"
    return is_argument or operand.num_bytes > assumed.on_chip_bytes


def _live_frac(instruction: "Instruction", operand: "Instruction") -> float:
    """Returns the part of an operand that a kernel reads: a Triton kernel reads only the columns in use of a cache."""
    shape = operand.arrays[0].shape if len(operand.arrays) == 1 else ()
    columns = max(shape[2:]) if len(shape) == 4 else 0
    is_cache = columns >= COLUMNS and operand.opcode == "get-tuple-element"
    return LIVE / columns if is_cache and "triton" in instruction.target else 1.0


def least_seconds(model: Mapping[str, Any], rows: int, chip: Any) -> float:
    """Returns the bound of the time of a token of all rows."""
    from groupax.models.families import read_config
    from groupax.models.specs import model_specs

    config = read_config(model)
    weights = sum(math.prod(spec.shape) for layer in model_specs(config)["layers"] for spec in layer.values())
    weights += config.vocab_size * config.hidden_size
    token_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    columns = rows * LIVE + rows // GROUP * PROMPT
    flops = 2 * rows * weights + 4 * rows * config.num_layers * config.num_heads * config.head_dim * (LIVE + PROMPT)
    return max((2 * weights + token_bytes * columns) / chip.memory_bytes_per_s, flops / chip.flops)


def estimate(name: str, rows: int, chip: Any, dumps: Path | None) -> dict[str, Any]:
    """Returns a row of the table."""
    from groupax.planning.kernels import read_gpu_program

    model, programs = MODELS[name], []
    for layers in (1, 2):
        folder = None if dumps is None else dumps / f"{name}-{rows}-{layers}"
        programs.append(compiled(model, rows, layers) if folder is None else read_gpu_program(folder, "decode_chunk"))
    work = [program.work(STEPS)[0] for program in programs]
    more = model["num_hidden_layers"] - 1
    seconds = {}
    for key, assumed in (("low", LOW), ("high", HIGH)):
        first, second = (step_seconds(program, chip, assumed) for program in programs)
        seconds[key] = first + more * (second - first)
    bound_s = least_seconds(model, rows, chip)
    return {
        "model, rows": f"{name}, {rows}",
        "kernels": work[0].num_launches + more * (work[1].num_launches - work[0].num_launches),
        "host visits": work[0].host_visits,
        "bound, tokens/s": round(rows / bound_s),
        "low": round(rows / seconds["low"]),
        "high": round(rows / seconds["high"]),
        "of the bound": f"{bound_s / seconds['low']:.2f} to {bound_s / seconds['high']:.2f}",
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    flags.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    flags.add_argument("--rows", nargs="+", default=[64, 256, 1024], type=int)
    flags.add_argument("--dumps", type=Path, help="folder of dumped programs")
    args = flags.parse_args()
    prepare("h100-1")
    chip = find_target("h100-1").chip
    show([estimate(name, rows, chip, args.dumps) for name in args.models for rows in args.rows], args.json)


if __name__ == "__main__":
    main()
