"""Plans as text and as JSON records."""

from collections.abc import Iterable
from typing import Any

from groupax.satellites.planning.abstract import host_bytes
from groupax.satellites.planning.fitting import Plan
from groupax.satellites.planning.measured import OTHER
from groupax.satellites.planning.run import ACTIVATIONS, LOGITS, Run

# A table's unit follows its largest value, so that it is not all zeros.
_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
KINDS = (
    "masters",
    "optimizer",
    "policy",
    "base",
    "vision",
    "reference",
    "rollout weights",
    "kv cache",
    "gradients",
    ACTIVATIONS,
    LOGITS,
    OTHER,
)


def format_plan(plan: Plan) -> str:
    """Returns a plan as tables."""
    if plan.fault is not None:
        return verdict(plan)
    assert plan.run is not None, "there is no fault"
    lines = [_settings(plan), ""]
    if plan.is_estimate:
        lines += [
            "by arithmetic, before anything is compiled: without the compiler's copies",
            "",
        ]
    lines += [*_memory_table(plan), ""]
    if of_host := _host_memory(plan.run):
        sizes = ", ".join(f"{kind} {_size(num_bytes)}" for kind, num_bytes in of_host.items())
        lines += [f"host memory for each device: {sizes}", ""]
    return "\n".join([*lines, verdict(plan)])


def verdict(plan: Plan) -> str:
    """Returns a line that says whether a plan fits."""
    if plan.fault is not None:
        return f"does not fit: {plan.fault}"
    most, chip = plan.largest, plan.target.chip
    if chip is None:
        return f"the peak is {_size(most.total)} per device, in {most.name}"
    fits = "fits" if plan.fits else "DOES NOT FIT"
    if plan.is_estimate:
        about = "probably fits" if plan.fits else "probably DOES NOT FIT"
        return (
            f"{about}: the peak is about {_size(most.total)} of {_size(chip.memory_bytes)} per device, in {most.name}"
        )
    return f"{fits}: the peak is {_size(most.total)} of {_size(chip.memory_bytes)} per device, in {most.name}"


def plan_record(plan: Plan) -> dict[str, Any]:
    """Returns a plan as numbers: bytes, and seconds of compilation."""
    run = plan.run
    record: dict[str, Any] = {
        "devices": plan.target.name,
        "mesh": list(plan.mesh.shape.values()),
        "changes": list(plan.request.changes),
        "fits": plan.fits,
        "fault": None if plan.fault is None else str(plan.fault),
    }
    if run is None:
        return record
    record["programs"] = [
        {
            "name": program.name,
            "compile_s": None if program.compile_s is None else round(program.compile_s, 1),
            "layers_compiled": list(program.num_layers),
            "memory": dict(program.memory),
            "total": program.total,
        }
        for program in plan.programs
    ]
    record["host_memory"] = _host_memory(run)
    return record | {"num_rows": run.num_rows, "num_updates": run.num_updates}


def _settings(plan: Plan) -> str:
    run, args, shape = plan.run, plan.request.args, plan.mesh.shape
    assert run is not None, "there is no fault"
    sizes = ", ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1) or "one device"
    return (
        f"{plan.target.name}: {plan.mesh.devices.size} devices, {sizes}\n"
        f"{run.num_rows} completions of {args.max_completion_length} tokens in each rollout, {run.num_updates} "
        f"update{'s' * (run.num_updates > 1)} on them; a device decodes {run.cache.num_slots} rows at once, and an "
        f"update has {run.num_micro_batches} micro-batch{'es' * (run.num_micro_batches > 1)} of "
        f"{run.micro_batch_cells} tokens"
    )


def _host_memory(run: Run) -> dict[str, float]:
    """Returns bytes of host memory for each device, by kind."""
    sizes = {kind: host_bytes({kind: tree}) for kind, tree in run.residents.items()}
    return {kind: num_bytes for kind, num_bytes in sizes.items() if num_bytes}


def _memory_table(plan: Plan) -> list[str]:
    kinds = [kind for kind in KINDS if any(program.memory.get(kind) for program in plan.programs)]
    prefix, unit = _unit(program.total for program in plan.programs)
    rows = [["", *kinds, "total"]]
    for program in plan.programs:
        cells = [f"{size / unit:.2f}" if (size := program.memory.get(kind)) else "" for kind in kinds]
        rows.append([program.name, *cells, f"{program.total / unit:.2f}"])
    return [f"memory of a device, {prefix}B", *_aligned(rows)]


def _unit(values: Iterable[float]) -> tuple[str, float]:
    """Returns the prefix with which the largest value is at least 1, and its factor."""
    largest = max(values, default=0.0)
    return next((each for each in _PREFIXES if largest >= each[1]), _PREFIXES[-1])


def _size(num_bytes: float) -> str:
    prefix, unit = _unit([num_bytes])
    return f"{num_bytes / unit:.2f} {prefix}B"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
