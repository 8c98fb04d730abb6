"""The state of a run between steps, apart from the policy: its progress, its rollout, the rows of its updates.

Imports no jax.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

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


def row_of(
    rollout: Rollout, group: int, ends: Collection[FinishReason], with_sampler_logps: bool, branch: Branch | None = None
) -> Row:
    """Returns a scored completion, or a branch of it, as a row, without the log-probs that the trainer computes."""
    counts = not rollout.is_failure and rollout.finish_reason not in ends
    stream = rollout if branch is None else branch
    return Row(
        group=group,
        prompt=stream.prompt_ids,
        completion=stream.completion_ids,
        mask=stream.mask & counts,
        advantages=np.where(stream.mask, np.float32(rollout.advantage), np.float32(0.0)),
        rollout_logp=stream.policy_logps,
        policy_version=rollout.policy_version,
        sampler_logp=stream.sampler_logps if with_sampler_logps else None,
        experts=rollout.experts if branch is None else None,
        is_failure=rollout.is_failure,
        is_branch=branch is not None,
        images=rollout.images,
    )
