"""Plans as text and as JSON records."""

from collections.abc import Iterable
from typing import Any

from groupax.parallel.accelerators import Chip
from groupax.satellites.planning.abstract import host_bytes
from groupax.satellites.planning.fitting import Plan
from groupax.satellites.planning.measured import OTHER, step_seconds
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
    lines += ["work of a device in one run of each program", *_work_table(plan), ""]
    if plan.target.chip is not None:
        lines += [_least_time(plan, plan.target.chip), ""]
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
    """Returns a plan as numbers: bytes, operations and seconds."""
    chip, run = plan.target.chip, plan.run
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
            "runs": program.runs,
            "compile_s": None if program.compile_s is None else round(program.compile_s, 1),
            "layers_compiled": list(program.num_layers),
            "memory": dict(program.memory),
            "total": program.total,
            "flops": program.counts.flops,
            "product_bytes": program.counts.product_bytes,
            "exchanged": dict(program.counts.exchanged),
            "between_hosts": program.counts.between_hosts,
            "transferred_bytes": program.transferred_bytes,
            "seconds": program.seconds(chip) if chip else None,
        }
        for program in plan.programs
    ]
    record["host_memory"] = _host_memory(run)
    record |= {"gathered_bytes": run.gathered_bytes, "fetched_bytes": run.fetched_bytes}
    record |= {"num_rows": run.num_rows, "num_updates": run.num_updates}
    if chip is not None:
        record["step_seconds"] = step_seconds(plan.programs, run, chip)
    return record


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


def _work_table(plan: Plan) -> list[str]:
    chip = plan.target.chip
    all_counts = [program.counts for program in plan.programs]
    flop_prefix, flop = _unit(counts.flops for counts in all_counts)
    product_prefix, product = _unit(counts.product_bytes for counts in all_counts)
    sent_prefix, other = _unit(sent for counts in all_counts for sent in counts.exchanged.values())
    rows = [["", "runs", f"{flop_prefix}FLOP", f"{product_prefix}B in matmuls", f"{sent_prefix}B sent"]]
    rows[0] += ["at least", "bound by"] if chip else []
    for program in plan.programs:
        counts = program.counts
        row = [
            program.name,
            str(program.runs),
            f"{counts.flops / flop:.2f}",
            f"{counts.product_bytes / product:.2f}",
            ", ".join(f"{sent / other:.2f} {kind}" for kind, sent in counts.exchanged.items() if sent >= other / 200)
            or "-",
        ]
        if chip:
            seconds = program.seconds(chip)
            bound = max(seconds, key=lambda name: seconds[name])
            row += [milliseconds(seconds[bound]), bound if seconds[bound] else "-"]
        rows.append(row)
    return _aligned(rows)


def milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds, with three digits or to the millisecond."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _least_time(plan: Plan, chip: Chip) -> str:
    run = plan.run
    assert run is not None, "there is no fault"
    phases = step_seconds(plan.programs, run, chip)
    total = sum(phases.values())
    tokens = run.num_rows * plan.request.args.max_completion_length
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in phases.items() if seconds)
    num = plan.mesh.devices.size
    return (
        f"at least {total:.3g} s for a rollout and its updates ({parts}) at the device's stated peaks: at most "
        f"{tokens / total:,.0f} tokens/s, {tokens / total / num:,.0f} per device"
    )


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
