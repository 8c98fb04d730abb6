"""How well a model does on held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupax.data import PromptSet
from groupax.engine.engine import Engine
from groupax.engine.params import SamplingParams
from groupax.metrics import Metrics, completion_metrics
from groupax.rewards.contract import reward_matrix
from groupax.rewards.runner import RewardRunner
from groupax.rewards.scoring import score_groups
from groupax.rollout import Rollout, rollout


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Metrics of an evaluation, and the completions that they are of.

    Attributes:
        metrics: mean of each reward and of their weighted sum, lengths, truncation.
        rollouts: in the order of the prompts, with their rewards.
    """

    metrics: Metrics
    rollouts: Sequence[Rollout]


def evaluate(
    engine: Engine,
    tokenizer: Any,
    runner: RewardRunner,
    weights: np.ndarray,
    prompts: PromptSet,
    params: SamplingParams,
) -> Evaluation:
    """Sample `params.n` completions of every prompt and score them.

    Args:
        engine: with the weights to evaluate.
        tokenizer: for the completions' text.
        runner: of the K rewards.
        weights: [K], of the weighted sum.
        prompts: the evaluation set.
        params: how to sample.

    Raises:
        RewardError: a call failed and the runner is to stop for it.
    """
    scored = score_groups(rollout(engine, tokenizer, prompts.examples, prompts.token_ids, params, step=0), runner)
    rollouts = [row for group in scored.groups for row in group]
    names = [reward.name for reward in runner.rewards]
    rewards = reward_matrix(names, rollouts)
    applies = ~np.isnan(rewards)
    metrics: Metrics = {}
    for name, column, ok in zip(names, rewards.T, applies.T, strict=True):
        metrics[f"rewards/{name}/mean"] = float(column[ok].mean()) if ok.any() else float("nan")
        if scored.failures[name]:
            metrics[f"rewards/{name}/failures"] = float(scored.failures[name])
    totals = np.where(applies, rewards * weights[None, :], 0.0).sum(axis=1)[applies.any(axis=1)]
    metrics["reward"] = float(totals.mean()) if totals.size else float("nan")
    return Evaluation(metrics | dict(scored.metrics) | completion_metrics(rollouts), rollouts)
