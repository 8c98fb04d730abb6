"""How well a model does on held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupax.data import PromptSet
from groupax.engine.engine import Engine
from groupax.engine.params import SamplingParams
from groupax.metrics import Metrics, completion_metrics
from groupax.rewards.contract import Reward, rewards_by_name, score
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
    rewards: Sequence[Reward],
    weights: np.ndarray,
    prompts: PromptSet,
    params: SamplingParams,
) -> Evaluation:
    """Sample `params.n` completions of every prompt and score them.

    Args:
        engine: with the weights to evaluate.
        tokenizer: for the completions' text.
        rewards: K functions.
        weights: [K], of the weighted sum.
        prompts: the evaluation set.
        params: how to sample.
    """
    groups = sorted(
        rollout(engine, tokenizer, prompts.examples, prompts.token_ids, params, step=0),
        key=lambda group: group[0].prompt_index,
    )
    rollouts = [row for group in groups for row in group]
    scores = np.stack([score(reward, rollouts) for reward in rewards], axis=1)
    applies = ~np.isnan(scores)
    metrics = {
        f"rewards/{reward.name}/mean": float(column[ok].mean()) if ok.any() else float("nan")
        for reward, column, ok in zip(rewards, scores.T, applies.T, strict=True)
    }
    totals = np.where(applies, scores * weights[None, :], 0.0).sum(axis=1)[applies.any(axis=1)]
    metrics["reward"] = float(totals.mean()) if totals.size else float("nan")
    names = [reward.name for reward in rewards]
    scored = [
        replace(row, rewards=rewards_by_name(names, values)) for row, values in zip(rollouts, scores, strict=True)
    ]
    return Evaluation(metrics | completion_metrics(rollouts), scored)
