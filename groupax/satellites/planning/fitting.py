"""The search for settings that fit where the requested ones do not, with the smallest change first."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from groupax.core.config import GRPOConfig
from groupax.core.settings.compute import mesh_sizes
from groupax.core.terminal.activities import Activities
from groupax.engine.core import indivisible_dims
from groupax.models.config import ModelConfig
from groupax.models.lora import LoRAConfig
from groupax.models.params import split_dims
from groupax.models.specs import num_params
from groupax.parallel.mesh import check_divisible, decoding_mesh, default_mesh, splits_model
from groupax.runs.build import mesh_of
from groupax.satellites.planning.abstract import DoesNotFitError, Program
from groupax.satellites.planning.devices import Target, absent_devices, find_target
from groupax.satellites.planning.measured import (
    Compiled,
    Compiler,
    Extrapolation,
    FewLayers,
    Measured,
    few_layers,
    whole_program,
)
from groupax.satellites.planning.run import Run, estimated_temporaries, trace_run

# Plans with more changes are too far from the request.
MAX_CHANGES = 8
_FSDP = "1,-1,1,1,1"


@dataclass(frozen=True)
class Request:
    """A run to plan: its devices, its settings, and how these were changed from the user's."""

    devices: str
    args: GRPOConfig
    changes: tuple[str, ...] = ()

    def changed(self, text: str, devices: str | None = None, **settings: Any) -> "Request":
        """Returns the request with other settings, which `text` describes."""
        changes = (*self.changes, text)
        return Request(devices or self.devices, replace(self.args, **settings), changes)


@dataclass(frozen=True, eq=False)
class Plan:
    """A planned run."""

    request: Request  # the run
    target: Target  # the devices
    mesh: Any  # their mesh
    run: Run | None  # the traced programs; None if there is a fault
    programs: tuple[Measured, ...]  # the measured programs, or estimates from before they are compiled
    fault: DoesNotFitError | None = None  # the reason why no device has memory for the run, if so

    @property
    def is_estimate(self) -> bool:
        """True if nothing is compiled yet."""
        return any(program.compile_s is None for program in self.programs)

    @property
    def largest(self) -> Measured:
        """The program that needs the most memory."""
        return max(self.programs, key=lambda program: program.total)

    @property
    def fits(self) -> bool:
        """True if a device has enough memory for every program."""
        if self.fault is not None:
            return False
        return self.target.chip is None or self.largest.total <= self.target.chip.memory_bytes


def make_plan(
    config: ModelConfig,
    request: Request,
    lora: LoRAConfig | None,
    compiler: Compiler,
    activities: Activities,
    stop_early: bool = False,
    on_estimate: Callable[[Plan], None] | None = None,
) -> Plan:
    """Plans a run.

    Args:
        config: Config of the model.
        request: The run.
        lora: Config of the adapter to train; None for all weights.
        compiler: The compiler, which remembers earlier programs.
        activities: Shows what is done meanwhile.
        stop_early: Whether to stop at the first program that does not fit.
        on_estimate: Receives an estimate of the plan before anything is compiled; None for none.
    """
    target, args = find_target(request.devices), request.args
    mesh = mesh_of(args, target.devices) or default_mesh(4 * num_params(config), target.devices)
    check_divisible(split_dims(config), mesh, args.mesh_replicate)
    memory = target.chip.memory_bytes if target.chip else None
    try:
        run = trace_run(config, mesh, args, lora, memory)
    except DoesNotFitError as error:
        return Plan(request, target, mesh, None, (), error)
    few = [FewLayers(config, 1.0)] if compiler.all_layers else few_layers(config, lora)
    runs = [run if model.config == config else trace_run(model.config, mesh, args, lora, like=run) for model in few]
    each_program: list[Extrapolation] = []
    for index, program in enumerate(run.programs):
        same = [each.programs[index] for each in runs]
        each_program.append(
            whole_program(config, program) if program.scans_layers else Extrapolation(program, few, same)
        )
    if on_estimate is not None:
        with activities.doing(f"tracing and counting the programs of a {target.name} run"):
            temporaries = estimated_temporaries(config, mesh, args, run)
            estimates = tuple(each.estimated(run, temporaries.get(each.program.name, {})) for each in each_program)
        on_estimate(Plan(request, target, mesh, run, estimates))
    return Plan(request, target, mesh, run, _measured(each_program, run, target, compiler, activities, stop_early))


def _measured(
    each_program: Sequence[Extrapolation],
    run: Run,
    target: Target,
    compiler: Compiler,
    activities: Activities,
    stop_early: bool,
) -> tuple[Measured, ...]:
    """Compiles the programs of a run, the slowest first, and returns their measurements in order."""
    memory = target.chip.memory_bytes if target.chip else None

    def compiled(program: Program, num_layers: int) -> Compiled:
        with activities.doing(f"compiling {program.name} for {target.name}, {_layers((num_layers,))}"):
            return compiler.compiled(program)

    found: dict[str, Measured] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        slowest_first = sorted(each_program, key=lambda each: each.program.name != "micro_step")
        futures = [
            (each, [pool.submit(compiled, program, model.config.num_layers) for model, program in each.pairs])
            for each in slowest_first
        ]
        for each, parts in futures:
            measured = each.measured(run, [part.result() for part in parts])
            found[measured.name] = measured
            layers, seconds = _layers(measured.num_layers), measured.compile_s or 0.0
            activities.note(f"{measured.name}: {measured.total / 1e9:.2f} GB, compiled in {seconds:.0f} s, {layers}")
            if stop_early and memory is not None and measured.total > memory:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return tuple(found[each.program.name] for each in each_program if each.program.name in found)


def _layers(numbers: Sequence[int]) -> str:
    return f"{' and '.join(map(str, numbers))} layer{'s' * (max(numbers) > 1)}"


def find_fitting_plan(
    config: ModelConfig, plan: Plan, lora: LoRAConfig | None, compiler: Compiler, activities: Activities
) -> Plan | None:
    """Returns the nearest plan that fits, making one change after another; None if none of the first few fits."""
    for _ in range(MAX_CHANGES):
        for change in _changes(config, plan):
            activities.note(f"does not fit; trying {change.changes[-1]}")
            try:
                plan = make_plan(config, change, lora, compiler, activities, stop_early=True)
            except ValueError as error:  # an invalid run
                activities.note(str(error))
            else:
                break
        else:
            return None
        if plan.fits:
            return plan
    return None


def _changes(config: ModelConfig, plan: Plan) -> Iterator[Request]:
    """Yields changes of a plan that does not fit, the smallest first."""
    request, args = plan.request, plan.request.args
    is_rollout = plan.fault.in_rollout if plan.fault else plan.largest.name in ("admit", "decode_chunk")
    if plan.fault is None and not is_rollout and plan.run is not None and plan.largest.name != "apply_update":
        if plan.run.checkpointing != "full":
            yield request.changed("--gradient_checkpointing full", gradient_checkpointing="full")
        if _loop_copies_too_much(plan):
            yield request.changed("--scan_layers False", scan_layers=False)
        tokens, longest = plan.run.micro_batch_tokens, plan.run.longest_row
        if tokens > longest and plan.run.micro_batch_cells > longest:
            half = max(longest, min(tokens, plan.run.micro_batch_cells) // 2)
            yield request.changed(f"--micro_batch_tokens {half}", micro_batch_tokens=half)
    # decoding has its own copy of the weights only where they are sharded otherwise
    has_decoding_copy = splits_model(plan.mesh) or args.decoding_tp > 1 or args.decoding_weights != "same"
    may_shard = plan.mesh.devices.size > 1 and (args.mesh is None or mesh_sizes(args.mesh)[1] == 1)
    if may_shard and not (is_rollout and has_decoding_copy):
        yield request.changed(f"--mesh {_FSDP}", mesh=_FSDP)
    may_share = args.base_weights == "same" and not args.max_staleness
    if is_rollout and has_decoding_copy and may_share:
        tp = 2 * args.decoding_tp
        if not plan.mesh.devices.size % tp and not indivisible_dims(config, decoding_mesh(plan.mesh, tp)):
            yield request.changed(f"--decoding_tp {tp}", decoding_tp=tp)
    if is_rollout and plan.run is not None and plan.run.cache.num_slots > 2 and args.max_concurrent_rows > 2:
        slots = plan.run.cache.num_slots * plan.mesh.devices.size // args.decoding_tp // 2
        yield request.changed(f"--max_concurrent_rows {slots}", max_concurrent_rows=slots)
    if args.beta > 0 and not args.offload_reference:
        yield request.changed("--offload_reference", offload_reference=True)
    if not args.offload_optimizer:
        yield request.changed("--offload_optimizer", offload_optimizer=True)
    if plan.target.chip is not None and (larger := _larger(request.devices)):
        fixed = args.mesh is not None and -1 not in mesh_sizes(args.mesh)
        yield request.changed(f"{larger}", larger, **({"mesh": _FSDP} if fixed else {}))


def _loop_copies_too_much(plan: Plan) -> bool:
    """Returns whether the program is a loop over layers that would fit without the copy of their weights.

    Other programs are compiled layer by layer, which takes longer.
    """
    assert plan.target.chip is not None, "only memory that is known can be too small"
    assert plan.run is not None, "a program that does not fit was compiled"
    is_loop = any(each.scans_layers for each in plan.run.programs if each.name == plan.largest.name)
    excess = plan.largest.total - plan.target.chip.memory_bytes
    weights = sum(plan.largest.memory.get(kind, 0.0) for kind in ("policy", "base"))
    return plan.request.args.scan_layers is None and is_loop and weights >= excess


def _larger(name: str) -> str | None:
    """Returns the name of twice as many devices; None if there are none."""
    kind, _, number = name.strip().lower().rpartition("-")
    try:
        return absent_devices(f"{kind}-{2 * int(number)}").name
    except ValueError:
        return None
