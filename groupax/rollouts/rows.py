"""Turns completions into rows to train on. Imports no jax."""

import numpy as np

from groupax.types import Rollout, Row


def row_of(rollout: Rollout, group: int, mask_truncated: bool, with_sampler_logps: bool) -> Row:
    """Returns a scored completion as a row, without the log-probs that the trainer computes.

    Args:
        rollout: The completion.
        group: Number that the rows of its prompt share.
        mask_truncated: Whether the tokens of a completion that a limit ended do not count.
        with_sampler_logps: Whether the row needs the log-probs of the distribution that was drawn from.
    """
    counts = not rollout.is_failure and not (mask_truncated and rollout.is_truncated)
    return Row(
        group=group,
        prompt=rollout.prompt_ids,
        completion=rollout.completion_ids,
        mask=rollout.mask & counts,
        advantages=token_advantages(rollout),
        rollout_logp=rollout.policy_logps,
        policy_version=rollout.policy_version,
        sampler_logp=rollout.sampler_logps if with_sampler_logps else None,
    )


def token_advantages(rollout: Rollout) -> np.ndarray:
    """Returns the advantage of each token, [T] float32: that of its turn or else of the episode, 0 if not sampled."""
    if rollout.turn_advantages is None:
        return np.where(rollout.mask, np.float32(rollout.advantage), np.float32(0.0))
    values = np.zeros(len(rollout.completion_ids), np.float32)
    for turn, advantage in zip(rollout.turns, rollout.turn_advantages, strict=True):
        values[turn.start : turn.end] = advantage
    return np.where(rollout.mask, values, np.float32(0.0))
