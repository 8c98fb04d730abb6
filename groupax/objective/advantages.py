"""Computes group-relative advantages from rewards, on the host, in float64, over whole groups."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from groupax.core.settings.objective import MultiObjectiveAggregation, ScaleRewards
from groupax.core.settings.references import reference_to, resolve

STD_FLOOR = 1e-4  # keeps groups of almost equal rewards from blowing up

# (rewards [B, K], weights [K], num_generations) -> advantages [B]; see `group_advantages`.
AdvantageEstimator = Callable[[np.ndarray, np.ndarray, int], Any]


@dataclass(frozen=True)
class Advantages:
    """The advantages of a rollout's completions, and the rewards that they were computed from."""

    values: Float[np.ndarray, "B"]  # advantage of each completion
    rewards: Float[np.ndarray, "B"]  # weighted sum of each completion's rewards; NaN where no function applied
    # whether all rows of a group have equal rewards, so that it teaches nothing
    zero_std: Bool[np.ndarray, "P"]
    group_std: Float[np.ndarray, "P"]  # standard deviation (ddof 1) of each group's weighted rewards


def group_advantages(
    rewards: Float[np.ndarray, "B K"],
    weights: Float[np.ndarray, "K"],
    num_generations: int,
    scale: ScaleRewards = "group",
    aggregation: MultiObjectiveAggregation = "sum_then_normalize",
    estimator: AdvantageEstimator | None = None,
) -> Advantages:
    """Computes how much better each completion is than the others of its group.

    sum_then_normalize: A_i = (s_i - mean(s)) / (std(s) + 1e-4) over the group of i, with s_i = sum_k w_k R_ik.
    normalize_then_sum: s_i = sum_k w_k (R_ik - mean(R_k)) / (std(R_k) + 1e-4) over the group of i, then
    A_i = (s_i - mean(s)) / (std(s) + 1e-4) over the batch, so that no function drowns another by its scale.

    Each function is centred over the rows of the group where it applies before the columns are summed, so that a row
    that a function skips is neither punished nor favoured; without NaN this equals centring the sum.

    Args:
        rewards: rewards of contiguous groups by function; NaN where a function does not apply to a row.
        weights: weight of each reward function.
        num_generations: G, rows per group.
        scale: for sum_then_normalize, divide by the standard deviation (ddof 1) of the group, of the batch, or not.
        aggregation: one of the two formulas.
        estimator: computes the advantages in place of these formulas.

    Raises:
        ValueError: the rows are not whole groups, the weights do not match the columns, or the estimator does not
            return one finite number per row.

    Source: arXiv:2402.03300, section 4.1.2; unscaled: arXiv:2503.20783; normalize_then_sum: GDPO, arXiv:2601.05242.
    """
    (B, K), G = rewards.shape, num_generations
    if B % G or weights.shape != (K,):
        raise ValueError(f"{B} rows and {K} reward columns need groups of {G} and weights {weights.shape}")
    applies = ~np.isnan(rewards)
    weighted = np.where(applies, rewards * weights[None, :], 0.0).astype(np.float64)
    totals = weighted.sum(axis=1)
    scorable = np.asarray(applies.any(axis=1))
    centred = _centred(weighted, applies, G).sum(axis=2)
    is_gdpo = aggregation == "normalize_then_sum"
    signal = _standardized_sum(rewards, weights, applies, G) if is_gdpo else centred
    in_groups = scorable.reshape(signal.shape)
    group_std = _group_std(centred, in_groups)
    magnitude = np.abs(weighted).sum(axis=1).reshape(-1, G).max(axis=1)
    # the spread per group that sums of equal numbers may have by rounding
    zero_std = _group_std(signal, in_groups) <= 1e-9 * np.maximum(magnitude, 1e-9)
    if estimator is not None:
        values = np.where(scorable, _estimated(estimator, rewards, weights, G), 0.0)
    else:
        scaled = signal
        if is_gdpo:
            known = signal[in_groups]
            scaled = (signal - (known.mean() if known.size else 0.0)) / (_std(known) + STD_FLOOR)
        elif scale != "none":
            std = group_std[:, None] if scale == "group" else _std(totals[scorable])
            scaled = signal / (std + STD_FLOOR)
        values = np.where(zero_std[:, None] | ~in_groups, 0.0, scaled).reshape(B)
    return Advantages(values, np.where(scorable, totals, np.nan), zero_std, group_std)


def find_advantage_estimator(advantage_estimator: str | AdvantageEstimator) -> AdvantageEstimator | None:
    """Returns the function that the setting `advantage_estimator` names; None for "grpo".

    Raises:
        ValueError: there is no such function, or it cannot be called with rewards, weights and group size.
    """
    return resolve(
        "advantage_estimator",
        advantage_estimator,
        {"grpo": None, "rloo": rloo},
        ("rewards", "weights", "num_generations"),
    )


def rloo(rewards: np.ndarray, weights: np.ndarray, num_generations: int, normalize: bool = False) -> np.ndarray:
    """Computes A_i = s_i - the mean of s over the other completions of the group, [B]; 0 for rows without rewards.

    Each function compares a row with the others of the group where it applies. A row that has no others gets 0.

    Args:
        rewards: Rewards of contiguous groups by function, [B, K]; NaN where a function does not apply to a row.
        weights: Weight of each reward function, [K].
        num_generations: G, rows per group.
        normalize: Subtract the mean of the advantages of all rows, and divide by their standard deviation + 1e-4.

    Source: arXiv:2402.14740, section 3.3.
    """
    applies = ~np.isnan(rewards)
    weighted = np.where(applies, rewards * weights[None, :], 0.0)
    counts = applies.reshape(-1, num_generations, len(weights)).sum(axis=1, keepdims=True)
    own = _centred(weighted, applies, num_generations) * counts / np.maximum(counts - 1, 1)
    values, known = own.sum(axis=2).reshape(-1), applies.any(axis=1)
    if normalize and known.any():
        values = (values - values[known].mean()) / (_std(values[known]) + STD_FLOOR)
    return np.where(known, values, 0.0)


def _estimated(
    estimator: AdvantageEstimator, rewards: np.ndarray, weights: np.ndarray, num_generations: int
) -> np.ndarray:
    values = np.asarray(estimator(rewards, weights, num_generations), np.float64)
    is_known = ~np.isnan(rewards).all(axis=1)
    if values.shape != (len(rewards),) or not np.isfinite(values[is_known]).all():
        raise ValueError(
            f"advantage_estimator {reference_to(estimator)!r} must return one finite number for each of the "
            f"{len(rewards)} rows, got shape {list(values.shape)} with {int((~np.isfinite(values)).sum())} that are not"
        )
    return values


def _standardized_sum(rewards: np.ndarray, weights: np.ndarray, applies: np.ndarray, group_size: int) -> np.ndarray:
    """Computes the s_i of normalize_then_sum, [P, G] (see `group_advantages`)."""
    values = np.where(applies, rewards, 0.0)
    centred = _centred(values, applies, group_size)
    counts = applies.reshape(centred.shape).sum(axis=1, keepdims=True)
    std = np.sqrt(np.square(centred).sum(axis=1, keepdims=True) / np.maximum(counts - 1, 1))
    # equal rewards leave a rounding error, which must not be blown up
    spread = std > 1e-9 * np.maximum(np.abs(values).reshape(centred.shape).max(axis=1, keepdims=True), 1e-9)
    standardized = np.where(spread, centred / (std + STD_FLOOR), 0.0).reshape(values.shape) * weights[None, :]
    return standardized.sum(axis=1).reshape(-1, group_size)


def _centred(values: np.ndarray, applies: np.ndarray, group_size: int) -> np.ndarray:
    """Subtracts from each column its mean over the rows of the group where it applies, [P, G, K]; 0 elsewhere."""
    values, applies = (x.reshape(-1, group_size, x.shape[1]) for x in (values, applies))
    means = values.sum(axis=1, keepdims=True) / np.maximum(applies.sum(axis=1, keepdims=True), 1)
    return np.where(applies, values - means, 0.0)


def _group_std(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    return np.array([_std(row[ok]) for row, ok in zip(values, known, strict=True)])


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if values.size > 1 else 0.0
