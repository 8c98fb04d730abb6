"""Scoring of groups while further groups are sampled. Imports no jax."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from groupax.rewards.contract import Scores
from groupax.rewards.runner import RewardRunner
from groupax.types import Rollout, Turn


@dataclass(frozen=True, eq=False)
class Scored:
    """Groups with their rewards.

    Attributes:
        groups: Groups in the order of their prompts.
        failures: Number of completions without a reward because of a fault, by reward.
        errors: First error of each reward that failed.
        logged: Numbers that reward functions logged, one per call, by name.
        rollout_s: Seconds until the last group was sampled.
        reward_s: Further seconds until the last group was scored.
    """

    groups: list[list[Rollout]]
    failures: Mapping[str, int]
    errors: Mapping[str, str]
    logged: Mapping[str, Sequence[float]]
    rollout_s: float
    reward_s: float


def score_groups(sampled: Iterable[list[Rollout]], runner: RewardRunner) -> Scored:
    """Scores groups while further ones are sampled.

    Args:
        sampled: Yields each group when its last completion ends.
        runner: Runner of the rewards.

    Raises:
        RewardError: A call failed, and the runner's settings are to raise.
    """
    names, started_s = runner.names, time.perf_counter()
    groups = []
    for group in sampled:
        runner.start(group)
        groups.append(group)
    sampled_s = time.perf_counter()
    results = runner.finish()
    scored_s = time.perf_counter()

    failures = dict.fromkeys(names, 0)
    errors: dict[str, str] = {}
    logged: dict[str, list[float]] = {}
    for scores in results:
        for name, score in zip(names, scores, strict=True):
            failures[name] += score.num_failures
            if score.error:
                errors.setdefault(name, score.error)
            for metric, value in score.metrics.items():
                logged.setdefault(metric, []).append(value)
    scored = [_with_scores(group, names, scores) for group, scores in zip(groups, results, strict=True)]
    scored.sort(key=lambda group: group[0].prompt_index)
    return Scored(scored, failures, errors, logged, sampled_s - started_s, scored_s - sampled_s)


def _with_scores(group: Sequence[Rollout], names: Sequence[str], scores: Sequence[Scores]) -> list[Rollout]:
    matrix = np.stack([score.values for score in scores], axis=1)  # (G, K)
    # an episode whose environment failed is not compared with the others
    matrix[[row.is_failure for row in group]] = np.nan
    rewards = [[None if math.isnan(value) else value for value in own] for own in matrix.tolist()]
    by_turn = {name: score.by_turn for name, score in zip(names, scores, strict=True)}
    has_turns = any(values is not None for own in by_turn.values() for values in own)
    extra = {column: values for score in scores for column, values in score.extra.items()}
    return [
        replace(
            row,
            rewards=dict(zip(names, rewards[index], strict=True)),
            turns=_with_rewards(row, {n: own[index] for n, own in by_turn.items()}) if has_turns else row.turns,
            advantage=0.0,
            environment=None,
            extra={column: values[index] for column, values in extra.items() if index < len(values)},
        )
        for index, row in enumerate(group)
    ]


def _with_rewards(row: Rollout, by_turn: Mapping[str, tuple[float, ...] | None]) -> tuple[Turn, ...]:
    """Returns the turns with the rewards of the functions that gave one for each of them."""
    known = {name: values for name, values in by_turn.items() if values is not None}
    if not known or row.is_failure:
        return row.turns
    return tuple(
        replace(turn, rewards={name: values[index] for name, values in known.items()})
        for index, turn in enumerate(row.turns)
    )
