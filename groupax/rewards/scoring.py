"""From groups as they are sampled to groups with rewards. Imports no jax."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from groupax.rewards.contract import rewards_by_name
from groupax.rewards.runner import RewardRunner
from groupax.types import Rollout


@dataclass(frozen=True, eq=False)
class Scored:
    """Groups with their rewards.

    Attributes:
        groups: in the order of their prompts.
        failures: by reward, completions without one because something went wrong.
        errors: by reward that failed, what went wrong first.
        logged: what reward functions logged, of each call.
        rollout_s: seconds until the last group was sampled.
        reward_s: further seconds until the last one was scored.
    """

    groups: list[list[Rollout]]
    failures: Mapping[str, int]
    errors: Mapping[str, str]
    logged: Mapping[str, Sequence[float]]
    rollout_s: float
    reward_s: float


def score_groups(sampled: Iterable[list[Rollout]], runner: RewardRunner) -> Scored:
    """Score groups while further ones are sampled.

    Args:
        sampled: yields each group when its last completion ends.
        runner: of the rewards.

    Raises:
        RewardError: a call failed and the runner is to stop for it.
    """
    names = [reward.name for reward in runner.rewards]
    started_s = time.perf_counter()
    groups = []
    for group in sampled:
        runner.start(group)
        groups.append(group)
    sampled_s = time.perf_counter()
    results = runner.finish()
    scored_s = time.perf_counter()

    scored = []
    failures = dict.fromkeys(names, 0)
    errors: dict[str, str] = {}
    logged: dict[str, list[float]] = {}
    for group, scores in zip(groups, results, strict=True):
        matrix = np.stack([score.values for score in scores], axis=1)  # (G, K)
        for name, score in zip(names, scores, strict=True):
            failures[name] += score.num_failures
            if score.error:
                errors.setdefault(name, score.error)
            for metric, value in score.metrics.items():
                logged.setdefault(metric, []).append(value)
        extra = {column: values for score in scores for column, values in score.extra.items()}
        scored.append(
            [
                replace(
                    row,
                    rewards=rewards_by_name(names, matrix[index]),
                    advantage=0.0,
                    extra={column: values[index] for column, values in extra.items() if index < len(values)},
                )
                for index, row in enumerate(group)
            ]
        )
    return Scored(
        sorted(scored, key=lambda group: group[0].prompt_index),
        failures,
        errors,
        logged,
        sampled_s - started_s,
        scored_s - sampled_s,
    )
