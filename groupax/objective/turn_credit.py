"""Advantages of the turns of episodes, by what they still earned."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from groupax.core.settings.objective import ScaleRewards
from groupax.objective.advantages import STD_FLOOR, Advantages, group_advantages


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
