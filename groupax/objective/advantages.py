"""From rewards to group-relative advantages: on the host, in float64, over whole groups."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

ScaleRewards = Literal["group", "batch", "none"]
STD_FLOOR = 1e-4  # keeps groups of almost equal rewards from blowing up


@dataclass(frozen=True)
class Advantages:
    """What a rollout's rewards come to.

    Attributes:
        values: advantage of each completion.
        rewards: weighted sum of each completion's rewards; NaN where no function applied.
        zero_std: per group, all of its rewards are equal, so that it teaches nothing.
        group_std: per group, the standard deviation (ddof 1) of its weighted rewards.
    """

    values: Float[np.ndarray, "B"]
    rewards: Float[np.ndarray, "B"]
    zero_std: Bool[np.ndarray, "P"]
    group_std: Float[np.ndarray, "P"]


def group_advantages(
    rewards: Float[np.ndarray, "B K"],
    weights: Float[np.ndarray, "K"],
    num_generations: int,
    scale: ScaleRewards = "group",
) -> Advantages:
    """A_i = (s_i - mean(s)) / (std(s) + 1e-4) over the group of i, with s_i = sum_k w_k R_ik.

    Args:
        rewards: one row per completion, groups contiguous, one column per reward function; NaN where a function
            does not apply to a row. Each function is centred over the rows of the group where it applies before
            the columns are summed, so that a row that a function skips is neither punished nor favoured; without
            NaN this equals centring the sum.
        weights: of the reward functions.
        num_generations: G, rows per group.
        scale: divide by the group's standard deviation (ddof 1), by that of the whole batch, or not at all.

    Raises:
        ValueError: the rows are no whole groups, or the weights do not match the columns.

    Source: arXiv:2402.03300, section 4.1.2; unscaled: arXiv:2503.20783.
    """
    B, K = rewards.shape
    if B % num_generations or weights.shape != (K,):
        raise ValueError(
            f"{B} rows and {K} reward columns need groups of {num_generations} and weights {weights.shape}"
        )
    applies = ~np.isnan(rewards)
    weighted = np.where(applies, rewards * weights[None, :], 0.0).astype(np.float64)
    scorable = applies.any(axis=1)

    in_groups = (-1, num_generations, K)
    counts = applies.reshape(in_groups).sum(axis=1, keepdims=True)
    means = weighted.reshape(in_groups).sum(axis=1, keepdims=True) / np.maximum(counts, 1)
    centred = np.where(applies.reshape(in_groups), weighted.reshape(in_groups) - means, 0.0).sum(axis=2)

    group_std = np.array([_std(row[ok]) for row, ok in zip(centred, scorable.reshape(centred.shape), strict=True)])
    # sums of equal numbers differ by rounding; a spread below it is none
    magnitude = np.abs(weighted).sum(axis=1).reshape(centred.shape).max(axis=1)
    zero_std = group_std <= 1e-9 * np.maximum(magnitude, 1e-9)
    values = np.where(zero_std[:, None], 0.0, centred)
    if scale == "group":
        values = values / (group_std[:, None] + STD_FLOOR)
    elif scale == "batch":
        values = values / (_std(weighted.sum(axis=1)[scorable]) + STD_FLOOR)
    totals = np.where(scorable, weighted.sum(axis=1), np.nan)
    return Advantages(np.where(scorable, values.reshape(B), 0.0), totals, zero_std, group_std)


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if values.size > 1 else 0.0
