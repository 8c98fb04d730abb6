"""What a run carries from step to step beside the policy. Imports no jax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from groupax.metrics import Metrics
from groupax.rollout import Rollout

if TYPE_CHECKING:
    from groupax.batch import Row

Group = list[Rollout]


@dataclass(frozen=True)
class Cursor:
    """How far a run has come.

    Attributes:
        step: optimizer steps, skipped ones included.
        num_rollouts: rollouts that were sampled.
        num_prompts: prompts that were visited.
        num_tokens: prompt and completion tokens that were sampled.
        num_bad_steps: skipped updates in a row.
        evaluated_step: step of the last evaluation in the loop.
    """

    step: int = 0
    num_rollouts: int = 0
    num_prompts: int = 0
    num_tokens: int = 0
    num_bad_steps: int = 0
    evaluated_step: int = 0


@dataclass(frozen=True, eq=False)
class Experience:
    """A rollout and how far the updates on it have come.

    Attributes:
        groups: with rewards and advantages; those to train on first, then those that dynamic sampling dropped.
        metrics: of everything that was sampled.
        errors: by reward that failed, what went wrong first.
        first_prompt: prompts that the run had visited before it.
        num_tokens: prompt and completion tokens that were sampled.
        slices: the rows of each (see `groupax.slices`); their `old_logp` is None until it is known.
        num_used: slices that were trained on, in all passes.
    """

    groups: Sequence[Group]
    metrics: Metrics
    errors: Mapping[str, str]
    first_prompt: int
    num_tokens: int
    slices: "Sequence[Sequence[Row]]" = ()
    num_used: int = 0
