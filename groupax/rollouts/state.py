"""What a run carries from step to step beside the policy. Imports no jax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from groupax.types import Metrics, Rollout

if TYPE_CHECKING:
    from groupax.types import Row

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
        slices: the rows of each (see `groupax.rollouts.slices`); their `old_logp` is None until it is known.
        num_used: slices that were trained on, in all passes.
    """

    groups: Sequence[Group]
    metrics: Metrics
    errors: Mapping[str, str]
    first_prompt: int
    num_tokens: int
    slices: "Sequence[Sequence[Row]]" = ()
    num_used: int = 0

    def num_left(self, num_passes: int) -> int:
        """Slices that are still to be trained on, in all passes."""
        return len(self.slices) * num_passes - self.num_used

    def next_rows(self, num: int, before: "Sequence[Row]" = ()) -> "list[Row]":
        """The rows of the next slices.

        Args:
            num: of slices.
            before: rows of other rollouts in the same step, from whose groups these are told apart.
        """
        rows = [row for place in self._next_places(num) for row in self.slices[place]]
        first_group = 1 + max((row.group for row in before), default=-1)
        return [replace(row, group=row.group + first_group) for row in rows] if before else rows

    def next_indices(self, num: int) -> list[int]:
        """Where the rows of the next slices stand among the completions of all groups, one group behind another."""
        size = len(self.slices[0])
        return [place * size + index for place in self._next_places(num) for index in range(len(self.slices[place]))]

    def after(self, num: int, logps: Sequence[np.ndarray]) -> "Experience":
        """The rollout after an update on the next slices.

        Args:
            num: of slices.
            logps: of their rows, [T] each, as the update found them: those of the old policy from now on.
        """
        slices, logps_left = list(self.slices), iter(logps)
        for place in self._next_places(num):
            part = slices[place]
            own = [next(logps_left) for _ in part]
            if part[0].old_logp is None:
                slices[place] = [replace(row, old_logp=logp) for row, logp in zip(part, own, strict=True)]
        return replace(self, slices=slices, num_used=self.num_used + num)

    def _next_places(self, num: int) -> list[int]:
        return [(self.num_used + index) % len(self.slices) for index in range(num)]
