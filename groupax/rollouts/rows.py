"""Turns scored completions into rows to train on: their advantages, their masks, their minibatches. Imports no jax."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from groupax.objective.advantages import (
    Advantages,
    clipped_sum,
    find_advantage_estimator,
    group_advantages,
    return_advantages,
    with_penalty,
)
from groupax.rewards.contract import reward_matrix, turn_reward_matrices
from groupax.rollouts.state import Group
from groupax.settings.objective import AdvantageSettings, MaskSettings
from groupax.types import TRUNCATIONS, Branch, FinishReason, Rollout, Row


def advantages_of(
    rollouts: Sequence[Rollout],
    names: Sequence[str],
    weights: np.ndarray,
    num_generations: int,
    settings: AdvantageSettings | Any,
    penalty: np.ndarray | None = None,
) -> Advantages:
    """Returns the advantages of completions by their rewards."""
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


def with_advantages(groups: Sequence[Group], advantages: Advantages) -> list[Group]:
    """Returns groups whose completions have these advantages, in their order."""
    values, of_turns = iter(advantages.values.tolist()), advantages.turns
    turns = itertools.repeat(None) if of_turns is None else (tuple(own.tolist()) for own in of_turns)
    return [[replace(row, advantage=next(values), turn_advantages=next(turns)) for row in group] for group in groups]


def minibatches_of(
    groups: Sequence[Group], size: int, settings: MaskSettings | Any, with_sampler_logps: bool
) -> list[list[Row]]:
    """Cuts scored groups into minibatches of rows; those of one prompt share a number and its computation."""
    ends, numbers = masked_ends(settings), dict[tuple[int, bytes], int]()
    episodes: list[list[Row]] = []
    for index, group in enumerate(groups):
        for rollout in group:
            prompts = [each.prompt_ids.tobytes() for each in (rollout, *rollout.branches)]
            number, *others = [numbers.setdefault((index, prompt), len(numbers)) for prompt in prompts]
            row = row_of(rollout, number, ends, with_sampler_logps)
            further = zip(rollout.branches, others, strict=True)
            episodes.append([row, *(row_of_branch(*each, row, rollout.advantage) for each in further)])
    minibatches = [episodes[start : start + size] for start in range(0, len(episodes), size)]
    return [[row for rows in minibatch for row in rows] for minibatch in minibatches]


def masked_ends(settings: MaskSettings) -> Collection[FinishReason]:
    """Returns the ends of completions that do not count in the loss."""
    ends = settings.mask_truncated_completions
    return (TRUNCATIONS if ends else ()) if isinstance(ends, bool) else ends


def row_of(rollout: Rollout, group: int, masked_ends: Collection[FinishReason], with_sampler_logps: bool) -> Row:
    """Returns a scored completion as a row, without the log-probs that the trainer computes.

    A token that was sampled has the advantage of its turn, or else that of the episode, and all others have 0.
    """
    counts = not rollout.is_failure and rollout.finish_reason not in masked_ends
    advantages = np.full(len(rollout.completion_ids), rollout.advantage, np.float32)
    if rollout.turn_advantages is not None:
        advantages[:] = 0.0
        for turn, advantage in zip(rollout.turns, rollout.turn_advantages, strict=True):
            advantages[turn.start : turn.end] = advantage
    return Row(
        group=group,
        prompt=rollout.prompt_ids,
        completion=rollout.completion_ids,
        mask=rollout.mask & counts,
        advantages=np.where(rollout.mask, advantages, np.float32(0.0)),
        rollout_logp=rollout.policy_logps,
        policy_version=rollout.policy_version,
        sampler_logp=rollout.sampler_logps if with_sampler_logps else None,
        experts=rollout.experts,
        is_failure=rollout.is_failure,
        adapter=rollout.adapter,
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
        adapter=branch.adapter,
    )
