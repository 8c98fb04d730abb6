"""Settings that fit, where those that were asked for do not: what to change, nearest first."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from groupax.config import GRPOConfig
from groupax.engine.tensor_parallel import indivisible_dims
from groupax.models.config import ModelConfig
from groupax.models.lora import LoRAConfig
from groupax.models.specs import num_params, split_dims
from groupax.parallel.accelerators import tpu_slice
from groupax.parallel.mesh import check_divisible, decoding_mesh, default_mesh, splits_model
from groupax.planning.devices import Target, target_of
from groupax.planning.measured import Compiler, Measured
from groupax.planning.programs import UnfitError
from groupax.planning.run import Run, run_of
from groupax.runs.build import mesh_of
from groupax.settings.compute import mesh_sizes

# More changes than this are no neighbours of what was asked for.
MOST_CHANGES = 8
_FSDP = "1,-1,1,1,1"


@dataclass(frozen=True)
class Asked:
    """What a run is to be: where, with which settings, and what of that is another than was asked for."""

    devices: str
    args: GRPOConfig
    changes: tuple[str, ...] = ()

    def changed(self, text: str, devices: str | None = None, **settings: Any) -> "Asked":
        """The same but for a setting, which `text` says."""
        return Asked(devices or self.devices, replace(self.args, **settings), (*self.changes, text))


@dataclass(frozen=True, eq=False)
class Plan:
    """A run on devices, measured.

    Attributes:
        asked: what it is.
        target: the devices.
        mesh: of them.
        run: what it computes.
        programs: what each takes.
        fault: why it cannot be, if it cannot; there is no more than that then.
    """

    asked: Asked
    target: Target
    mesh: Any
    run: Run | None
    programs: tuple[Measured, ...]
    fault: UnfitError | None = None

    @property
    def largest(self) -> Measured:
        """The program that takes most memory."""
        return max(self.programs, key=lambda program: program.total)

    @property
    def fits(self) -> bool:
        """Whether a device has memory for all of it."""
        if self.fault is not None:
            return False
        return self.target.chip is None or self.largest.total <= self.target.chip.memory_bytes


def plan_of(
    config: ModelConfig,
    asked: Asked,
    lora: LoRAConfig | None,
    compiler: Compiler,
    tell: Callable[[str], None],
    stop_early: bool = False,
) -> Plan:
    """What a run takes.

    Args:
        config: the model.
        asked: the run.
        lora: the adapter that is trained, if one is.
        compiler: what was compiled before.
        tell: is told what is under way.
        stop_early: at the first program that does not fit.

    Raises:
        ValueError: the mesh does not divide the devices or the model, or settings contradict each other.
    """
    target, args = target_of(asked.devices), asked.args
    mesh = mesh_of(args, target.devices) or default_mesh(4 * num_params(config), target.devices)
    check_divisible(split_dims(config), mesh, args.mesh_replicate)
    memory = target.chip.memory_bytes if target.chip else None
    try:
        run = run_of(config, mesh, args, lora, memory)
    except UnfitError as error:
        return Plan(asked, target, mesh, None, (), error)
    slowest_first = sorted(run.programs, key=lambda program: program.name != "micro_step")
    programs: list[Measured] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(compiler.measured, run, program) for program in slowest_first]:
            measured = future.result()
            programs.append(measured)
            tell(f"{measured.name}: {measured.total / 1e9:.2f} GB, compiled in {measured.compile_s:.0f} s")
            if stop_early and memory is not None and measured.total > memory:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    order = [program.name for program in run.programs]
    programs.sort(key=lambda program: order.index(program.name))
    return Plan(asked, target, mesh, run, tuple(programs))


def fitting_plan(
    config: ModelConfig, plan: Plan, lora: LoRAConfig | None, compiler: Compiler, tell: Callable[[str], None]
) -> Plan | None:
    """The nearest plan that fits, by one change after another; None if there is none among the first few."""
    for _ in range(MOST_CHANGES):
        for change in _changes(config, plan):
            tell(f"does not fit; trying {change.changes[-1]}")
            try:
                plan = plan_of(config, change, lora, compiler, tell, stop_early=True)
            except ValueError as error:  # that is no run
                tell(str(error))
            else:
                break
        else:
            return None
        if plan.fits:
            return plan
    return None


def _changes(config: ModelConfig, plan: Plan) -> Iterator[Asked]:
    """What may be changed of a plan that does not fit, the least first."""
    asked, args = plan.asked, plan.asked.args
    is_rollout = plan.fault.in_rollout if plan.fault else plan.largest.name in ("admit", "decode_chunk")
    if plan.fault is None and not is_rollout and plan.run is not None and plan.largest.name != "apply_update":
        if args.gradient_checkpointing != "full":
            yield asked.changed("--gradient_checkpointing full", gradient_checkpointing="full")
        tokens, longest = plan.run.micro_batch_tokens, plan.run.longest_row
        if tokens > longest and plan.run.micro_batch_cells > longest:
            half = max(longest, min(tokens, plan.run.micro_batch_cells) // 2)
            yield asked.changed(f"--micro_batch_tokens {half}", micro_batch_tokens=half)
    # a copy of whole weights is there already only where they are split
    is_copied = splits_model(plan.mesh) or args.decoding_tp > 1 or args.decoding_weights != "same"
    may_split = plan.mesh.devices.size > 1 and (args.mesh is None or mesh_sizes(args.mesh)[1] == 1)
    if may_split and not (is_rollout and is_copied):
        yield asked.changed(f"--mesh {_FSDP}", mesh=_FSDP)
    may_share = args.decoding_weights in ("same", "bfloat16") and args.base_weights == "same" and not args.max_staleness
    if is_rollout and is_copied and may_share:
        tp = 2 * args.decoding_tp
        if not plan.mesh.devices.size % tp and not indivisible_dims(config, decoding_mesh(plan.mesh, tp)):
            yield asked.changed(f"--decoding_tp {tp}", decoding_tp=tp)
    if is_rollout and is_copied and args.decoding_weights == "same" and args.decoding_tp == 1:
        yield asked.changed("--decoding_weights int8", decoding_weights="int8")
    if is_rollout and plan.run is not None and plan.run.cache.num_slots > 2 and args.max_concurrent_rows > 2:
        slots = plan.run.cache.num_slots * plan.mesh.devices.size // args.decoding_tp // 2
        yield asked.changed(f"--max_concurrent_rows {slots}", max_concurrent_rows=slots)
    if args.beta > 0 and not args.offload_reference:
        yield asked.changed("--offload_reference", offload_reference=True)
    if not args.offload_optimizer:
        yield asked.changed("--offload_optimizer", offload_optimizer=True)
    if plan.target.chip is not None and (larger := _larger(asked.devices)):
        fixed = args.mesh is not None and -1 not in mesh_sizes(args.mesh)
        yield asked.changed(f"{larger}", larger, **({"mesh": _FSDP} if fixed else {}))


def _larger(name: str) -> str | None:
    """The slice of twice as many chips; None if there is none."""
    kind, _, number = tpu_slice(name).name.partition("-")
    try:
        return tpu_slice(f"{kind}-{2 * int(number)}").name
    except ValueError:
        return None
