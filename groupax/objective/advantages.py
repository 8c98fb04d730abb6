"""Computes group-relative advantages from rewards, on the host, in float64, over whole groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from groupax.core.settings.objective import MultiObjectiveAggregation, ScaleRewards
from groupax.core.settings.references import reference_to, resolve

STD_FLOOR = 1e-4  # keeps groups of almost equal rewards from blowing up

# (rewards [B, K], weights [K], num_generations) -> advantages [B]; see `group_advantages`.
AdvantageEstimator = Callable[[np.ndarray, np.ndarray, int], Any]


@dataclass(frozen=True)
class Advantages:
    """The advantages of a rollout's completions, and the rewards that they were computed from.

    Attributes:
        values: advantage of each completion.
        rewards: weighted sum of each completion's rewards; NaN where no function applied.
        zero_std: whether all rows of a group have equal rewards, or returns of turns, so that it teaches nothing.
        group_std: standard deviation (ddof 1) of each group's weighted rewards.
        turns: advantages of the turns of each completion, where they differ; None for `values`.
    """

    values: Float[np.ndarray, "B"]
    rewards: Float[np.ndarray, "B"]
    zero_std: Bool[np.ndarray, "P"]
    group_std: Float[np.ndarray, "P"]
    turns: tuple[Float[np.ndarray, "_"], ...] | None = None


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


def clipped_sum(
    rewards: Float[np.ndarray, "B K"], weights: Float[np.ndarray, "K"], low: float, high: float
) -> Float[np.ndarray, "B 1"]:
    """Returns the weighted sums of the rewards as one column, clipped to [low, high]; NaN where no function applies."""
    known = ~np.isnan(rewards).all(axis=1)
    totals = np.clip(np.nansum(rewards * weights[None, :], axis=1), low, high)
    return np.where(known, totals, np.nan)[:, None]


def with_penalty(rewards: Float[np.ndarray, "B K"], penalty: Float[np.ndarray, "B"]) -> Float[np.ndarray, "B L"]:
    """Returns the rewards with one more column, the negative penalty; NaN for rows where no function applies."""
    column = np.where(np.isnan(rewards).all(axis=1), np.nan, -penalty)
    return np.concatenate([rewards, column[:, None]], axis=1)


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
    standardized = _standardized(np.where(applies, rewards, 0.0), applies, group_size) * weights[None, :]
    return standardized.sum(axis=1).reshape(-1, group_size)


def _centred(values: np.ndarray, applies: np.ndarray, group_size: int) -> np.ndarray:
    """Subtracts from each column its mean over the rows of the group where it applies, [P, G, K]; 0 elsewhere."""
    values, applies = (x.reshape(-1, group_size, x.shape[1]) for x in (values, applies))
    means = values.sum(axis=1, keepdims=True) / np.maximum(applies.sum(axis=1, keepdims=True), 1)
    return np.where(applies, values - means, 0.0)


def _standardized(values: np.ndarray, applies: np.ndarray, group_size: int) -> np.ndarray:
    """Centres each column and divides it by its deviation (ddof 1) in the group, [B, K]; 0 where it does not apply."""
    centred = _centred(values, applies, group_size)
    counts = applies.reshape(centred.shape).sum(axis=1, keepdims=True)
    std = np.sqrt(np.square(centred).sum(axis=1, keepdims=True) / np.maximum(counts - 1, 1))
    # equal rewards leave a rounding error, which must not be blown up
    spread = std > 1e-9 * np.maximum(np.abs(values).reshape(centred.shape).max(axis=1, keepdims=True), 1e-9)
    return np.where(spread, centred / (std + STD_FLOOR), 0.0).reshape(values.shape)


def _group_std(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    return np.array([_std(row[ok]) for row, ok in zip(values, known, strict=True)])


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if values.size > 1 else 0.0


def return_advantages(
    turn_rewards: Sequence[Float[np.ndarray, "_ K"]],
    weights: Float[np.ndarray, "K"],
    num_generations: int,
    scale: ScaleRewards = "group",
    discount: float = 1.0,
) -> Advantages:
    """Computes how much better the rest of each completion is, from each of its turns, than that of its group.

    The return of turn t of row i is G_it = sum over u >= t of discount^(u - t) r_iu. Its baseline b_it is the mean of
    G_jt over the *other* rows j of the group that have a turn t, or else over the last turns of all other rows. The
    advantage is A_it = G_it - b_it. Since b_it depends on other rows only, E[b_it grad log pi(actions of turn t)] = 0:
    the baseline adds no bias. A mean that includes row i would multiply A_it by (N - 1) / N for N rows alive, and so
    weigh turns by how many rows reach them (tests/objective/test_turn_credit.py counts it out).

    Each reward function has its own returns and baselines, over the rows to which it applies; A_it is their weighted
    sum. A function that applies to no other row of the group contributes nothing.

    With `scale` "none" the policy gradient by these advantages is unbiased. "group" divides them by their own root mean
    square over the turns of the group, each times m / (m + 1) for the m rows of its baseline; "batch" by that over the
    batch. For episodes of one turn "group" is the standard deviation (ddof 1) of their rewards.

    Args:
        turn_rewards: rewards of each turn by function, [turns, K] for each row of contiguous groups; NaN in all turns
            where a function does not apply to the row.
        weights: weight of each reward function.
        num_generations: G, rows per group.
        scale: divide by a deviation of the group, of the batch, or not.
        discount: factor of a reward for each turn that it comes later. Below 1 the gradient is the usual one, which
            does not discount the turns themselves: it prefers early rewards and is that of no objective.

    Returns:
        The advantages; `values` are those of the first turns, and `zero_std` is True for groups without any.

    Raises:
        ValueError: the rows are not whole groups, or the weights do not match the columns.
    """
    totals = np.array([rewards.sum(axis=0) for rewards in turn_rewards])
    whole = group_advantages(totals, weights, num_generations, scale="none")
    groups = [turn_rewards[start : start + num_generations] for start in range(0, len(turn_rewards), num_generations)]
    by_group = [_group_credit(group, weights, discount) for group in groups]
    has_signal = np.array([bool(credit.advantages.any()) for credit in by_group])
    divisors = np.ones(len(groups))
    if scale == "group":
        divisors = np.array([_root_mean(credit.squares) for credit in by_group]) + STD_FLOOR
    elif scale == "batch":
        divisors[:] = _root_mean(np.concatenate([credit.squares for credit in by_group])) + STD_FLOOR
    turns = tuple(
        row[: len(rewards)] / divisor
        for credit, group, divisor in zip(by_group, groups, divisors, strict=True)
        for row, rewards in zip(credit.advantages, group, strict=True)
    )
    values = np.array([row[0] for row in turns])
    return Advantages(values, whole.rewards, ~has_signal, whole.group_std, turns)


class _Credit(NamedTuple):
    """The advantages of a group, [G, T], 0 where a row has no turn, and the squares of those that count, [N]."""

    advantages: np.ndarray
    squares: np.ndarray


def _group_credit(turn_rewards: Sequence[np.ndarray], weights: np.ndarray, discount: float) -> _Credit:
    """Computes the advantages of the turns of one group before scaling."""
    G, T, K = len(turn_rewards), max(map(len, turn_rewards)), len(weights)
    rewards, alive = np.zeros((G, T, K)), np.zeros((G, T), bool)
    for i, row in enumerate(turn_rewards):
        rewards[i, : len(row)], alive[i, : len(row)] = row, True
    applies = np.asarray(~np.isnan(rewards).any(axis=1))
    returns = np.where(applies[:, None], rewards, 0.0)
    for t in reversed(range(T - 1)):
        returns[:, t] += discount * returns[:, t + 1]
    baselines, is_known = _baselines(returns, alive, applies)
    counts = alive[..., None] & is_known
    differences = np.where(counts, returns - baselines, 0.0)
    # equal returns leave a rounding error, which must not be blown up
    size = 1e-9 * np.maximum((np.abs(returns) * np.abs(weights)).sum(axis=2).max(), 1e-9)
    advantages = (differences * weights).sum(axis=2)
    advantages = np.where(np.abs(advantages).max(initial=0.0) <= size, 0.0, advantages)
    is_scored = alive & np.asarray(applies.any(axis=1))[:, None]
    return _Credit(advantages, (np.square(advantages) * _shrinkage(is_scored))[is_scored])


def _baselines(returns: np.ndarray, alive: np.ndarray, applies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean return of the other rows, [G, T, K], and whether there is any other row, [G, 1, K]."""
    last = returns[np.arange(len(returns)), alive.sum(axis=1) - 1][:, None]
    counted = alive[..., None] & applies[:, None]
    others, num_others = _of_others(np.where(counted, returns, 0.0)), _of_others(counted.astype(float))
    ended, num_ended = _of_others(np.where(applies[:, None], last, 0.0)), _of_others(applies[:, None].astype(float))
    alive_mean, ended_mean = others / np.maximum(num_others, 1), ended / np.maximum(num_ended, 1)
    return np.where(num_others > 0, alive_mean, ended_mean), applies[:, None] & (num_ended > 0)


def _shrinkage(is_scored: np.ndarray) -> np.ndarray:
    """Returns m / (m + 1) for the m other rows in the baseline of each turn, [G, T]."""
    num_alive = _of_others(is_scored.astype(float))
    num_rows = _of_others(is_scored[:, :1].astype(float))
    m = np.where(num_alive > 0, num_alive, num_rows)
    return m / (m + 1)


def _of_others(values: np.ndarray) -> np.ndarray:
    """Returns the sum over all rows but the own one."""
    return values.sum(axis=0, keepdims=True) - values


def _root_mean(squares: np.ndarray) -> float:
    return float(np.sqrt(squares.mean())) if squares.size else 0.0
