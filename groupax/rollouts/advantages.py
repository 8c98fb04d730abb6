"""The advantages of scored completions, as the settings ask for them. Imports no jax."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from groupax.objective.advantages import (
    Advantages,
    clipped_sum,
    find_advantage_estimator,
    group_advantages,
    with_penalty,
)
from groupax.objective.returns import return_advantages
from groupax.rewards.contract import reward_matrix, turn_reward_matrices
from groupax.settings.objective import AdvantageSettings
from groupax.types import Rollout


def advantages_of(
    rollouts: Sequence[Rollout],
    names: Sequence[str],
    weights: np.ndarray,
    num_generations: int,
    settings: AdvantageSettings | Any,
    penalty: np.ndarray | None = None,
) -> Advantages:
    """Returns the advantages of completions by their rewards.

    Args:
        rollouts: Completions of whole groups, with their rewards.
        names: Names of the rewards.
        weights: Weight of each reward.
        num_generations: Number of completions of a group.
        settings: How advantages are computed; a config has them too.
        penalty: Subtracted from the sum of each completion's rewards after it was clipped; None for nothing.
    """
    if settings.turn_credit == "returns":
        matrices = turn_reward_matrices(names, rollouts)
        return return_advantages(matrices, weights, num_generations, settings.scale_rewards, settings.turn_discount)
    rewards = reward_matrix(names, rollouts)
    totals = np.where(np.isnan(rewards).all(axis=1), np.nan, np.nansum(rewards * weights, axis=1))
    if settings.reward_clip_range is not None:
        rewards, weights = clipped_sum(rewards, weights, *settings.reward_clip_range), np.ones(1)
    if penalty is not None:
        rewards, weights = with_penalty(rewards, penalty), np.append(weights, 1.0)
    scale, aggregation = settings.scale_rewards, settings.multi_objective_aggregation
    estimator = find_advantage_estimator(settings.advantage_estimator)
    advantages = group_advantages(rewards, weights, num_generations, scale, aggregation, estimator)
    return replace(advantages, rewards=totals)
