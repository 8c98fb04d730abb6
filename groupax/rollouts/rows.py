"""Turns completions into rows to train on. Imports no jax."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from groupax.settings.objective import MaskSettings
from groupax.types import TRUNCATIONS, Branch, FinishReason, Rollout, Row


def masked_ends(settings: MaskSettings) -> Collection[FinishReason]:
    """Returns the ends of completions that do not count in the loss."""
    ends = settings.mask_truncated_completions
    return (TRUNCATIONS if ends else ()) if isinstance(ends, bool) else ends


def row_of(rollout: Rollout, group: int, masked_ends: Collection[FinishReason], with_sampler_logps: bool) -> Row:
    """Returns a scored completion as a row, without the log-probs that the trainer computes.

    Args:
        rollout: The completion.
        group: Number that the rows of its prompt share.
        masked_ends: Ends of completions whose tokens do not count.
        with_sampler_logps: Whether the row needs the log-probs of the distribution that was drawn from.
    """
    counts = not rollout.is_failure and rollout.finish_reason not in masked_ends
    return Row(
        group=group,
        prompt=rollout.prompt_ids,
        completion=rollout.completion_ids,
        mask=rollout.mask & counts,
        advantages=token_advantages(rollout),
        rollout_logp=rollout.policy_logps,
        policy_version=rollout.policy_version,
        sampler_logp=rollout.sampler_logps if with_sampler_logps else None,
        experts=rollout.experts,
        is_failure=rollout.is_failure,
        adapter=rollout.adapter,
        images=rollout.images,
    )


def row_of_branch(branch: Branch, group: int, row: Row, advantage: float) -> Row:
    """Returns a further stream of an episode as a row.

    Args:
        branch: The stream.
        group: Number that the rows of its prompt share.
        row: Row of the rollout that it belongs to.
        advantage: Advantage of the episode.
    """
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
        adapter=branch.adapter,
    )


def token_advantages(rollout: Rollout) -> np.ndarray:
    """Returns the advantage of each token, [T] float32: that of its turn or else of the episode, 0 if not sampled."""
    if rollout.turn_advantages is None:
        return np.where(rollout.mask, np.float32(rollout.advantage), np.float32(0.0))
    values = np.zeros(len(rollout.completion_ids), np.float32)
    for turn, advantage in zip(rollout.turns, rollout.turn_advantages, strict=True):
        values[turn.start : turn.end] = advantage
    return np.where(rollout.mask, values, np.float32(0.0))
