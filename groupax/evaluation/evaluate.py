"""Sampling and scoring of held-out prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from groupax.data.prompts import PromptSet
from groupax.evaluation.answers import ACCURACY_REWARDS
from groupax.evaluation.items import Item, estimates, make_items
from groupax.evaluation.sets import ONLY_SET
from groupax.events import Emit, counted, ignore
from groupax.metrics.completions import completion_metrics, logged_metrics, with_logged
from groupax.metrics.estimates import Estimate
from groupax.rewards.contract import Reward
from groupax.rewards.runner import RewardRunner
from groupax.rewards.scoring import score_groups
from groupax.rollouts.sampler import rollout
from groupax.settings.fields import nearest
from groupax.settings.sampling import SamplingParams
from groupax.types import Metrics

if TYPE_CHECKING:
    from groupax.engine.engine import Engine


@dataclass(frozen=True, eq=False)
class SetEvaluation:
    """How well a model did on one evaluation set.

    Attributes:
        items: each prompt with its completions, in the order of the set.
        estimates: pass@k, maj@k, the reward and each reward function, with 95 % intervals.
        metrics: the estimates' values and ends, lengths, truncation, failures and what was left out, as plain numbers.
        params: how it was sampled.
        correctness_reward: the reward whose 1 means that a completion is right.
        errors: by reward that failed, what went wrong first.
    """

    items: Sequence[Item]
    estimates: Mapping[str, Estimate]
    metrics: Metrics
    params: SamplingParams
    correctness_reward: str | None
    errors: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How well a model did on each of its evaluation sets.

    Attributes:
        sets: by name.
    """

    sets: Mapping[str, SetEvaluation]

    @property
    def metrics(self) -> Metrics:
        """Of all sets. A name is that of the metric, with the set's before it if sets were given by name."""
        if set(self.sets) == {ONLY_SET}:
            return dict(self.sets[ONLY_SET].metrics)
        return {f"{name}_{metric}": value for name, each in self.sets.items() for metric, value in each.metrics.items()}

    @property
    def errors(self) -> Mapping[str, str]:
        """By reward that failed, what went wrong in one of the sets."""
        return {name: error for each in self.sets.values() for name, error in each.errors.items()}


def evaluate(
    engine: "Engine",
    tokenizer: Any,
    runner: RewardRunner,
    weights: np.ndarray,
    prompts: PromptSet,
    params: SamplingParams,
    correctness_reward: str | None = None,
    emit: Emit = ignore,
    phase: str = "evaluating",
) -> SetEvaluation:
    """Sample `params.n` completions of every prompt and score them.

    Args:
        engine: with the weights to evaluate.
        tokenizer: for the completions' text.
        runner: of the K rewards.
        weights: [K], of the weighted sum.
        prompts: the evaluation set.
        params: how to sample.
        correctness_reward: the reward whose 1 means that a completion is correct; without one there are no
            pass@k and maj@k.
        emit: Receives the phases of sampling and scoring.
        phase: Name of the sampling phase.

    Raises:
        RewardError: a call failed and the runner is to stop for it.
    """
    groups = rollout(engine, tokenizer, prompts.examples, prompts.token_ids, params, step=0)
    scored = score_groups(counted(groups, emit, phase, len(prompts), f"{phase}, scoring"), runner)
    names = [reward.name for reward in runner.rewards]
    items = make_items(scored.groups, names, weights, correctness_reward)
    found = estimates(items)
    metrics: Metrics = {}
    for name, estimate in found.items():
        metrics |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    for name in ("reward", *(f"rewards/{name}/mean" for name in names)):
        metrics.setdefault(name, float("nan"))
    metrics |= {f"rewards/{name}/failures": float(count) for name, count in scored.failures.items() if count}
    metrics |= {
        **completion_metrics([row for group in scored.groups for row in group]),
        "prompts": float(len(items)),
        "prompts_dropped": float(prompts.num_dropped),
        "prompts_truncated": float(prompts.num_truncated),
        "prompts_unscorable": float(sum(not item.is_scorable for item in items)) if correctness_reward else 0.0,
    }
    return SetEvaluation(
        items, found, with_logged(metrics, logged_metrics([scored])), params, correctness_reward, scored.errors
    )


def which_solves(correctness_reward: str | None, rewards: Sequence[Reward]) -> str | None:
    """The reward whose 1 means that a completion is right: the one asked for, or the first known to be of that kind.

    Raises:
        ValueError: the one asked for is none of the rewards.
    """
    names = [reward.name for reward in rewards]
    if correctness_reward is not None and correctness_reward not in names:
        raise ValueError(
            f"correctness_reward is {correctness_reward!r}, which is no reward function"
            f"{nearest(correctness_reward, names)}; there are {', '.join(names)}"
        )
    return correctness_reward or next((name for name in names if name in ACCURACY_REWARDS), None)
