"""The state of a run between steps, apart from the policy: its progress, its rollout, the rows of its updates.

Imports no jax.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from groupax.core.config import GRPOConfig
from groupax.core.settings.objective import MaskSettings
from groupax.core.types import TRUNCATIONS, Branch, FinishReason, Metrics, Rollout, Row

Group = list[Rollout]


@dataclass(frozen=True)
class Cursor:
    """The progress of a run."""

    step: int = 0  # number of optimizer steps, including skipped ones
    num_rollouts: int = 0  # number of rollouts so far
    num_prompts: int = 0  # number of visited prompts
    num_tokens: int = 0  # number of tokens of prompts and of sampled tokens
    num_bad_steps: int = 0  # number of consecutive skipped updates
    evaluated_step: int = 0  # step of the last evaluation in the loop


@dataclass(frozen=True, eq=False)
class Experience:
    """A rollout and the progress of the updates on it."""

    # groups with rewards and advantages; those to train on first, then those that dynamic sampling dropped
    groups: Sequence[Group]
    metrics: Metrics  # metrics of everything that was sampled
    errors: Mapping[str, str]  # first error of each reward function that failed, by its name
    first_prompt: int  # number of prompts that the run had visited before
    num_tokens: int  # number of tokens of prompts and of sampled tokens
    # rows of each update of a pass; their `old_logp` is None until it is known
    minibatches: Sequence[Sequence[Row]] = ()
    num_used: int = 0  # number of minibatches that were trained on, in all passes

    def next_rows(self) -> list[Row]:
        """Returns the rows of the next minibatch."""
        return list(self.minibatches[self._next])

    def next_indices(self) -> list[int | None]:
        """Returns the indices of the rows of the next minibatch among the completions of all groups.

        A row of a further stream of an episode has none.
        """
        numbers = itertools.count()
        indices = [[None if row.is_branch else next(numbers) for row in rows] for rows in self.minibatches]
        return indices[self._next]

    def after(self, logps: Sequence[np.ndarray], num_passes: int) -> "Experience | None":
        """Returns the rollout after an update on the next minibatch; None if all passes over it are made.

        Args:
            logps: Log-probs of its rows before the update, [T] each; those of the old policy from now on.
            num_passes: Number of passes over the rollout.
        """
        num_used = self.num_used + 1
        if num_used >= num_passes * len(self.minibatches):
            return None
        minibatches, rows = list(self.minibatches), self.next_rows()
        if rows[0].old_logp is None:
            minibatches[self._next] = [replace(row, old_logp=logp) for row, logp in zip(rows, logps, strict=True)]
        return replace(self, minibatches=minibatches, num_used=num_used)

    @property
    def _next(self) -> int:
        return self.num_used % len(self.minibatches)


def masked_ends(settings: MaskSettings) -> Collection[FinishReason]:
    """Returns the ends of completions that do not count in the loss."""
    ends = settings.mask_truncated_completions
    return (TRUNCATIONS if ends else ()) if isinstance(ends, bool) else ends


def row_of(rollout: Rollout, group: int, masked_ends: Collection[FinishReason], with_sampler_logps: bool) -> Row:
    """Returns a scored completion as a row, without the log-probs that the trainer computes."""
    counts = not rollout.is_failure and rollout.finish_reason not in masked_ends
    return Row(
        group=group,
        prompt=rollout.prompt_ids,
        completion=rollout.completion_ids,
        mask=rollout.mask & counts,
        advantages=np.where(rollout.mask, np.float32(rollout.advantage), np.float32(0.0)),
        rollout_logp=rollout.policy_logps,
        policy_version=rollout.policy_version,
        sampler_logp=rollout.sampler_logps if with_sampler_logps else None,
        experts=rollout.experts,
        is_failure=rollout.is_failure,
        images=rollout.images,
    )


def row_of_branch(branch: Branch, group: int, row: Row, advantage: float) -> Row:
    """Returns a further stream of an episode as a row."""
    return replace(
        row,
        group=group,
        prompt=branch.prompt_ids,
        completion=branch.completion_ids,
        mask=branch.mask & bool(row.mask.any()),
        advantages=np.where(branch.mask, np.float32(advantage), np.float32(0.0)),
        rollout_logp=branch.policy_logps,
        sampler_logp=None if row.sampler_logp is None else branch.sampler_logps,
        experts=None,
        is_branch=True,
    )


MAX_DENOMINATOR = 10_000  # of a number of epochs


@dataclass(frozen=True)
class UpdateSchedule:
    """A schedule of optimizer steps: each update takes the next minibatch of the passes over a rollout."""

    prompts_per_rollout: int  # prompts that each rollout trains on
    minibatches: int  # minibatches that the rows of a rollout are cut into
    rows: int  # rows of a minibatch
    num_passes: int  # passes over each rollout
    drop_last: bool  # whether an epoch drops its last incomplete rollout

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps on each rollout, in all passes."""
        return self.minibatches * self.num_passes

    @property
    def rows_per_step(self) -> int:
        """Completions of an optimizer step."""
        return self.rows

    def prompts_per_epoch(self, num_examples: int) -> int:
        """Returns the number of prompts that an epoch visits.

        Raises:
            ValueError: there are fewer prompts than a rollout takes, and the incomplete rollout is dropped.
        """
        if not self.drop_last:
            return num_examples
        if num_examples < self.prompts_per_rollout:
            raise ValueError(
                f"the dataset has {num_examples} prompts and a rollout takes {self.prompts_per_rollout}, which leaves "
                "nothing of an epoch (drop_last); lower prompts_per_step or updates_per_rollout"
            )
        return num_examples - num_examples % self.prompts_per_rollout

    def num_steps(self, num_examples: int, num_epochs: float | int, max_steps: int) -> int:
        """Returns the optimizer steps of a run: `max_steps`, or those that visit every prompt `num_epochs` times."""
        prompts = self.prompts_per_epoch(num_examples)
        if max_steps > 0:
            return max_steps
        if self.drop_last:
            return math.ceil(num_epochs * (prompts // self.prompts_per_rollout) * self.updates_per_rollout)
        epochs = Fraction(num_epochs).limit_denominator(MAX_DENOMINATOR)
        return max(1, math.ceil(num_examples * epochs * self.minibatches / self.prompts_per_rollout)) * self.num_passes


def update_schedule(args: GRPOConfig) -> UpdateSchedule:
    """Returns the schedule that the settings ask for."""
    return UpdateSchedule(
        args.prompts_per_step * args.updates_per_rollout,
        args.updates_per_rollout,
        args.prompts_per_step * args.num_generations,
        args.num_iterations,
        args.drop_last,
    )
