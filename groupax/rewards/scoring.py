"""Scoring of groups while further groups are sampled. Imports no jax."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from groupax.core.types import Rollout
from groupax.rewards.contract import Scores
from groupax.rewards.runner import RewardRunner


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
    names = runner.names
    started_s = time.perf_counter()
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
    scored = [
        _with_scores(group, dict(zip(names, scores, strict=True)))
        for group, scores in zip(groups, results, strict=True)
    ]
    scored.sort(key=lambda group: group[0].prompt_index)
    return Scored(scored, failures, errors, logged, sampled_s - started_s, scored_s - sampled_s)


def _with_scores(group: Sequence[Rollout], scores: Mapping[str, Scores]) -> list[Rollout]:
    extra = {column: values for score in scores.values() for column, values in score.extra.items()}
    rows = []
    for index, row in enumerate(group):
        # an episode whose environment failed is not compared with the others
        values = {name: np.nan if row.is_failure else score.values[index] for name, score in scores.items()}
        by_turn = {name: score.by_turn[index] for name, score in scores.items()}
        by_turn = {} if row.is_failure else {name: each for name, each in by_turn.items() if each is not None}
        rows.append(
            replace(
                row,
                rewards={name: None if np.isnan(value) else float(value) for name, value in values.items()},
                turns=tuple(
                    replace(turn, rewards={name: each[number] for name, each in by_turn.items()}) if by_turn else turn
                    for number, turn in enumerate(row.turns)
                ),
                advantage=0.0,
                environment=None,
                extra={column: each[index] for column, each in extra.items() if index < len(each)},
            )
        )
    return rows
