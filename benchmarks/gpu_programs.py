"""Compiles the programs of a run for an H100 that is absent, and compares them with a table: make gpu

    python benchmarks/gpu_programs.py [--write] [--list decode_chunk] [--cases 0.5B]

Each program is compiled with two numbers of layers; the difference is what a layer adds. Kernels include copies and
library calls. They are counted for one iteration of a program's own loop: a token of a decoding chunk, a piece of the
prompts that are admitted; other loops count as often as they run. A number that is larger than in the table, and a
library call that is new or gone, are errors. `--write` writes the table, and `--list` prints a program's kernels.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

from hlo import Instruction, Module, parse_hlo
from models import QWEN3_06B, QWEN3_30B_A3B, QWEN_05B

from groupax.satellites.planning.devices import find_target, prepare

if TYPE_CHECKING:  # which imports jax, and `prepare` has to precede that
    from gpu_kernels import Work

TABLE = Path(__file__).parents[1] / "tests" / "golden" / "gpu_programs.json"
Numbers = dict[str, Any]
# Part by which bytes may differ.
TOLERANCE = 0.001
# They return elements of their first operand.
_SAME_ELEMENTS = frozenset(
    f"stablehlo.{name}"
    for name in ("convert", "transpose", "reshape", "broadcast_in_dim", "slice", "dynamic_slice", "gather")
)
_NARROW = frozenset({"bf16", "f16"})


@dataclass(frozen=True)
class Case:
    """Programs of a run.

    Attributes:
        model: The model's config.
        settings: Settings of the run.
        layers: The smaller number of layers.
        programs: Names of the programs; empty for all.
    """

    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    layers: int = 2
    programs: tuple[str, ...] = ()


CASES = {
    "Qwen2.5-0.5B, 64 rows": Case(
        QWEN_05B,
        {
            "num_generations": 8,
            "prompts_per_step": 8,
            "max_prompt_length": 512,
            "max_completion_length": 1024,
            "beta": 0.04,
        },
        programs=("admit", "decode_chunk", "score", "micro_step", "apply_update"),
    ),
    "Qwen3-0.6B, rows of 16,384 tokens": Case(
        QWEN3_06B,
        {
            "num_generations": 8,
            "prompts_per_step": 1,
            "max_prompt_length": 512,
            "max_completion_length": 15872,
            "micro_batch_tokens": 16384,
            "gradient_checkpointing": "none",
        },
        programs=("micro_step",),
    ),
    "Qwen3-30B-A3B": Case(
        QWEN3_30B_A3B,
        {
            "num_generations": 8,
            "prompts_per_step": 1,
            "max_prompt_length": 512,
            "max_completion_length": 960,
            "micro_batch_tokens": 8192,
            "gradient_checkpointing": "full",
        },
        programs=("micro_step",),
    ),
}


def compiled_programs(case: Case, layers: int) -> Iterator[tuple[str, Numbers, list[str]]]:
    """Compiles the programs of a case.

    Yields:
        The name of each program, its numbers, and a description of its kernels.
    """
    from gpu_kernels import compile_for_gpu

    from groupax import GRPOConfig
    from groupax.models.families import read_config
    from groupax.parallel.mesh import make_mesh
    from groupax.satellites.planning.run import trace_run

    target = find_target("h100-1")
    assert target.chip is not None, "an H100 is known"
    config = read_config({**case.model, "num_hidden_layers": layers})
    mesh = make_mesh(devices=target.devices)
    run = trace_run(config, mesh, GRPOConfig(**case.settings), None, target.chip.memory_bytes)
    for program in run.programs:
        if program.name not in case.programs:
            continue
        lowered = program.traced.lower()
        compiled, kernels = compile_for_gpu(lowered)
        step, others = kernels.work(program.loop_steps)
        module = parse_hlo(kernels.hlo)
        numbers = {
            "kernels": step.num_launches,
            "kernels outside its loop": others.num_launches,
            "host visits": step.host_visits,
            "launches by the host": step.dispatches,
            "float32 products of bfloat16": count_widened_products(lowered),
            "temporary MB": compiled.memory_analysis().temp_size_in_bytes / 1e6,
            **counted(module, step),
        }
        yield program.name, numbers, [*described(module, step), "outside its loop:", *described(module, others)]


def counted(module: Module, work: "Work") -> Numbers:
    """Counts copies, sorts, library calls, bytes and operations of a part of a program."""
    copies, sorts, flops, moved, calls, last = 0, 0, 0.0, 0.0, Counter[str](), ""
    instructions = module.instructions()
    for thunk, runs in work.launches:
        instruction = instructions.get(thunk.instruction)
        copies += runs if thunk.kind == "kCopy" else 0
        if instruction is None or instruction.name == last:  # of a sort, whose first kernel stands for all
            continue
        last, scope = instruction.name, module.scope(instruction)
        if instruction.opcode == "custom-call":
            calls[instruction.target] += runs
        inner = module.computations.get(instruction.called, {}).values()
        sorts += runs if any(each.opcode == "sort" for each in (instruction, *inner)) else 0
        flops += runs * module.flops(instruction, scope)
        moved += runs * sum(module.traffic(instruction, scope))
    return {
        "copies": copies,
        "sorts": sorts,
        "MB moved": moved / 1e6,
        "GFLOP of XLA's matmuls": flops / 1e9,
        "calls": dict(sorted(calls.items())),
    }


def described(module: Module, work: "Work") -> Iterator[str]:
    """Yields a line for each launch: its number, megabytes read and written, operation, source and results."""
    instructions: Mapping[str, Instruction] = module.instructions()
    for thunk, runs in work.launches:
        instruction = instructions.get(thunk.instruction)
        if instruction is None:
            yield f"{runs} x {thunk.kind} {thunk.label}"
            continue
        read, written = module.traffic(instruction, module.scope(instruction))
        source = "/".join(module.lines.get(instruction.frame, "").split("/")[-2:])
        results = " ".join(map(str, instruction.arrays))
        what = instruction.target or instruction.op_name
        yield (f"{runs:4} x {read / 1e6:9.3f} {written / 1e6:9.3f} MB  {instruction.name}  {what}  {source}  {results}")


def by_layer(fewer: Numbers, more: Numbers, layers: int) -> Numbers:
    """Splits what grows with the number of layers into that of a layer and that outside of layers."""
    numbers = dict(fewer)
    for name in ("kernels", "temporary MB", "MB moved"):
        of_layer = more[name] - fewer[name]
        numbers[f"{name} of a layer"] = of_layer
        numbers[f"{name} outside layers"] = fewer[name] - layers * of_layer
        del numbers[name]
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in numbers.items()}


def measured(case: Case) -> dict[str, Numbers]:
    """Returns the numbers of each program of a case."""
    fewer = {name: numbers for name, numbers, _ in compiled_programs(case, case.layers)}
    more = {name: numbers for name, numbers, _ in compiled_programs(case, case.layers + 1)}
    return {name: by_layer(fewer[name], more[name], case.layers) for name in fewer}


def differences(found: Numbers, known: Numbers) -> tuple[list[str], list[str]]:
    """Compares the numbers of a program with those of the table.

    Returns:
        Those that are worse and those that are better, each as a line.
    """
    worse, better = [], []
    for name in [*known, *(found.keys() - known.keys())]:
        now, before = found.get(name), known.get(name)
        line = f"{name}: {before} in the table, now {now}"
        if not isinstance(now, int | float) or not isinstance(before, int | float):
            if now != before:
                worse.append(line)
        elif abs(now - before) > TOLERANCE * abs(before):
            (better if now < before else worse).append(line)
    return worse, better


def count_widened_products(lowered: Any) -> int:
    """Counts the matmuls in float32 of which an operand was converted from bfloat16 or float16.

    A matmul of the narrow operands that is accumulated in float32 returns the same, and takes a fraction of the time.

    Args:
        lowered: A lowered program, see `jax.stages.Lowered`.
    """
    operations = list(_walk(lowered.compiler_ir("stablehlo").operation))
    callers: dict[str, list[Any]] = {}
    for operation in operations:
        if operation.name == "func.call":
            callers.setdefault(operation.attributes["callee"].value, []).append(operation)
    products = [each for each in operations if each.name in ("stablehlo.dot_general", "stablehlo.convolution")]
    return sum(
        any(_dtype(operand) == "f32" and _is_widened(operand, callers) for operand in each.operands)
        for each in products
    )


def _walk(operation: Any) -> Iterator[Any]:
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _walk(inner.operation)


def _is_widened(value: Any, callers: dict[str, list[Any]]) -> bool:
    """Returns whether an array is one of narrow floats, or one of float32 that was converted from such."""
    dtype = _dtype(value)
    return dtype in _NARROW or (
        dtype == "f32" and any(_is_widened(source, callers) for source in _sources(value, callers))
    )


def _dtype(value: Any) -> str:
    return str(value.type.element_type)


def _sources(value: Any, callers: dict[str, list[Any]]) -> Iterator[Any]:
    """Yields the arrays that a value's elements are taken from: operands, or arguments of the calls of its function."""
    owner = value.owner
    if not hasattr(owner, "arguments"):  # an operation, not a block
        if owner.name in _SAME_ELEMENTS:
            yield owner.operands[0]
        return
    index, parent = value.arg_number, owner.owner.operation
    if parent.name == "func.func":
        for call in callers.get(parent.attributes["sym_name"].value, ()):
            yield call.operands[index]
    elif parent.name == "stablehlo.while":
        yield parent.operands[index]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--write", action="store_true", help="write the table")
    flags.add_argument("--list", metavar="PROGRAM", help="print the kernels of this program")
    flags.add_argument("--cases", nargs="+", default=list(CASES), help="the cases whose name contains one of these")
    args = flags.parse_args()
    prepare("h100-1")
    cases = {name: case for name, case in CASES.items() if any(part in name for part in args.cases)}
    if args.list:
        for case in cases.values():
            for name, _, lines in compiled_programs(case, case.layers):
                if name == args.list:
                    print(*lines, sep="\n")
        return
    table = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    failed = False
    for title, case in cases.items():
        started_s = time.perf_counter()
        found, known = measured(case), table.get(title, {})
        print(
            f"{title}: {len(found)} programs with {case.layers} and {case.layers + 1} layers, "
            f"{time.perf_counter() - started_s:.0f} s",
            flush=True,
        )
        for name, numbers in found.items():
            worse, better = differences(numbers, known.get(name, {}))
            failed = failed or bool(worse)
            for kind, lines in (("WORSE", worse), ("better", better)):
                print(*(f"  {kind}: {name}: {line}" for line in lines), sep="\n", end="\n" * bool(lines))
        table[title] = found
    if args.write:
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
        print(f"wrote {TABLE}")
    elif failed:
        sys.exit("programs are worse than the table says; if this is meant, write it with --write")


if __name__ == "__main__":
    main()
