"""The programs of a run, as the trainer and the engine have them, with shapes in the place of arrays.

Prompts and completions are taken to be as long as they may become, all of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from groupax.config import GRPOConfig
from groupax.data.prompts import prompt_limit
from groupax.engine.plan import CacheShape
from groupax.models.config import ModelConfig
from groupax.models.lora import LoRAConfig
from groupax.planning.abstract import AbstractModel
from groupax.planning.programs import Program, UnfitError, host_bytes, own_bytes
from groupax.planning.rollouts import rollout_of
from groupax.planning.updates import training_of
from groupax.rollouts.slices import Slices, slices_of

_LENGTH = "max_completion_length"


@dataclass(frozen=True, eq=False)
class Run:
    """What is there while a run goes on, and what it computes.

    Attributes:
        programs: of a rollout and the updates on it, in their order.
        residents: arrays that are always there, by what they are.
        gathered_bytes: that each device gets from others before a rollout.
        fetched_bytes: that come from the hosts to each device before a rollout is scored.
        cache: shape of each device's keys and values.
        num_micro_batches: of an optimizer step.
        micro_batch_tokens: the most of each on one device, as it was set or found.
        micro_batch_cells: tokens of the largest of them on a device, padding included.
        longest_row: tokens of a prompt and a completion.
        num_rows: completions of a rollout.
        num_updates: optimizer steps on it.
    """

    programs: tuple[Program, ...]
    residents: Mapping[str, Any]
    gathered_bytes: float
    fetched_bytes: float
    cache: CacheShape
    num_micro_batches: int
    micro_batch_tokens: int
    micro_batch_cells: int
    longest_row: int
    num_rows: int
    num_updates: int


def run_of(
    config: ModelConfig, mesh: Mesh, args: GRPOConfig, lora: LoRAConfig | None = None, memory_bytes: float | None = None
) -> Run:
    """The programs of a run.

    Args:
        config: the model.
        mesh: of the devices, which need not exist.
        args: of the run.
        lora: the adapter that is trained, if one is.
        memory_bytes: of a device; None for no limit.

    Raises:
        ValueError: the settings contradict each other, or ask for what is not planned for.
        UnfitError: a device does not hold what is always there, or the rollout's weights, keys and values.
    """
    of_model = AbstractModel(config, mesh, args, lora)
    limit = math.inf if memory_bytes is None else memory_bytes
    left = limit - own_bytes(of_model.residents)
    if left <= 0:
        taken = own_bytes(of_model.residents) / 1e9
        raise UnfitError(
            f"weights and optimizer alone take {taken:.1f} GB of a device that has {limit / 1e9:.1f}", in_rollout=False
        )
    slices = _planned_slices(args)
    num_rows = slices.prompts_per_rollout * args.num_generations
    prompt = prompt_limit(config.max_positions, args.max_completion_length, args.max_prompt_length, _LENGTH)
    longest = (prompt, args.max_completion_length)
    rollout, cache, gathered = rollout_of(of_model, num_rows, longest, left)
    tokens = args.micro_batch_tokens or of_model.fitting_tokens(left)
    training = training_of(of_model, slices, longest, tokens)
    return Run(
        programs=(*rollout, *training.programs),
        residents=of_model.residents,
        gathered_bytes=gathered,
        fetched_bytes=host_bytes({"reference": of_model.residents.get("reference")}),
        cache=cache,
        num_micro_batches=training.num_parts,
        micro_batch_tokens=tokens,
        micro_batch_cells=training.cells,
        longest_row=sum(longest),
        num_rows=num_rows,
        num_updates=slices.steps_per_rollout,
    )


# Settings whose runs are others than those that are planned here, with the value that is.
_PLANNED: dict[str, Any] = {"base_weights": "same", "max_staleness": 0, "rollout_servers": ()}


def _planned_slices(args: GRPOConfig) -> Slices:
    """How rollouts become updates.

    Raises:
        ValueError: something is set that is not planned for.
    """
    for name, value in _PLANNED.items():
        if getattr(args, name) != value:
            raise ValueError(f"{name} {getattr(args, name)!r} is not planned for; leave it at {value!r}")
    slices = slices_of(args)
    if slices.per_step > 1:
        raise ValueError(
            f"updates_per_rollout {args.updates_per_rollout} has updates on parts of several rollouts, which are not "
            "planned for; choose a whole number"
        )
    return slices
