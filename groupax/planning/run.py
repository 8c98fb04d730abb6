"""The trainer's and the engine's programs of a run, for abstract arrays.

All prompts and completions are assumed to have their maximum length.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from groupax.config import GRPOConfig
from groupax.data.prompts import prompt_limit
from groupax.engine.scheduler import CacheShape
from groupax.models.config import ModelConfig
from groupax.models.lora import LoRAConfig
from groupax.planning.abstract import AbstractModel
from groupax.planning.counting import bytes_between_hosts
from groupax.planning.images import NO_IMAGES, PlannedImages, trace_encoding
from groupax.planning.programs import DoesNotFitError, Program, device_bytes, host_bytes
from groupax.planning.rollouts import trace_rollout
from groupax.planning.updates import trace_training
from groupax.rollouts.state import UpdateSchedule, update_schedule
from groupax.settings.compute import Checkpointing

_LENGTH = "max_completion_length"


@dataclass(frozen=True, eq=False)
class Run:
    """The resident arrays and the programs of a run.

    Attributes:
        num_devices: Number of devices.
        programs: Programs of a rollout and the updates on it, in order.
        residents: Arrays that stay in memory, by kind.
        gathered_bytes: Bytes that each device receives from others before a rollout.
        gathered_between_hosts: Each device's share of what its host receives from other hosts for that.
        fetched_bytes: Bytes that each device receives from its host before a rollout is scored.
        cache: Shape of each device's KV cache.
        num_micro_batches: Number of micro-batches of an optimizer step.
        checkpointing: What the backward pass recomputes, as set or chosen.
        micro_batch_tokens: Maximum tokens of a micro-batch on one device, as set or chosen.
        micro_batch_cells: Tokens of the largest micro-batch on one device, padding included.
        longest_row: Tokens of a prompt and a completion.
        num_rows: Number of completions of a rollout.
        num_updates: Number of optimizer steps on a rollout.
    """

    num_devices: int
    programs: tuple[Program, ...]
    residents: Mapping[str, Any]
    gathered_bytes: float
    gathered_between_hosts: float
    fetched_bytes: float
    cache: CacheShape
    num_micro_batches: int
    checkpointing: Checkpointing
    micro_batch_tokens: int
    micro_batch_cells: int
    longest_row: int
    num_rows: int
    num_updates: int


def trace_run(
    config: ModelConfig,
    mesh: Mesh,
    args: GRPOConfig,
    lora: LoRAConfig | None = None,
    memory_bytes: float | None = None,
    like: "Run | None" = None,
    images: PlannedImages = NO_IMAGES,
) -> Run:
    """Returns the programs of a run, most of which are traced when they are needed.

    Args:
        config: Config of the model.
        mesh: Mesh of the devices, which may be absent.
        args: Settings of the run.
        lora: Config of the adapter to train; None for all weights.
        memory_bytes: Memory of a device; None for no limit.
        like: A run of the same model with more layers, whose cache and micro-batches have the sizes to use; None for
            those that the engine and the learner would choose.
        images: Images of each prompt, whose tokens are part of its maximum length.

    Raises:
        ValueError: The settings contradict each other, or are not supported by plans.
        DoesNotFitError: A device cannot hold the resident arrays, or the rollout's weights, keys and values.
    """
    if like:
        args = replace(args, gradient_checkpointing=like.checkpointing, micro_batch_tokens=like.micro_batch_tokens)
    model_state = AbstractModel(config, mesh, args, lora)
    limit = math.inf if memory_bytes is None else memory_bytes
    left = math.inf if like else limit - device_bytes(model_state.residents)
    if left <= 0:
        taken = device_bytes(model_state.residents) / 1e9
        raise DoesNotFitError(
            f"weights and optimizer alone need {taken:.1f} GB of a device that has {limit / 1e9:.1f} GB",
            in_rollout=False,
        )
    schedule = _planned_schedule(args)
    num_rows = schedule.prompts_per_rollout * args.num_generations
    prompt = prompt_limit(config.max_positions, args.max_completion_length, args.max_prompt_length, _LENGTH)
    longest = (prompt, args.max_completion_length)
    rollout, cache, gathered = trace_rollout(model_state, num_rows, longest, left, like.cache if like else None)
    execution, tokens = model_state.execution(longest, left)
    training = trace_training(model_state, execution, schedule, longest, tokens)
    return Run(
        num_devices=mesh.devices.size,
        programs=(
            *trace_encoding(model_state, images, schedule.prompts_per_rollout),
            *rollout,
            *training.programs,
        ),
        residents=model_state.residents,
        gathered_bytes=gathered,
        gathered_between_hosts=bytes_between_hosts(gathered, mesh.devices.flat),
        fetched_bytes=host_bytes({"reference": model_state.residents.get("reference")}),
        cache=cache,
        num_micro_batches=training.num_micro_batches,
        checkpointing=execution.checkpointing,
        micro_batch_tokens=tokens,
        micro_batch_cells=training.cells,
        longest_row=sum(longest),
        num_rows=num_rows,
        num_updates=schedule.updates_per_rollout,
    )


# Settings for which only one value is supported by plans.
_PLANNED: dict[str, Any] = {"base_weights": "same", "max_staleness": 0, "rollout_servers": ()}


def _planned_schedule(args: GRPOConfig) -> UpdateSchedule:
    """Returns how rollouts are split into updates; refuses unsupported settings."""
    for name, value in _PLANNED.items():
        if getattr(args, name) != value:
            raise ValueError(f"{name} {getattr(args, name)!r} is not supported by plans; leave it at {value!r}")
    return update_schedule(args)
