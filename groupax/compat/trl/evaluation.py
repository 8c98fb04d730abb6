"""TRL's metrics of an evaluation, from its completions and the learner."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from groupax.evaluation.evaluate import Evaluation, SetEvaluation
from groupax.metrics.completions import reward_metrics, trl_zero_std_frac
from groupax.rewards.contract import reward_matrix
from groupax.rollouts.rows import advantages_of, masked_ends, row_of
from groupax.training.step import ROUTER_LOSS
from groupax.types import Metrics, Rollout, Row


def with_trl_metrics(trainer: Any, evaluation: Evaluation) -> Evaluation:
    """Returns an evaluation with the metrics that TRL has and groupax has not.

    They are the loss of the objective with the metrics of an update, and the spread of the rewards.

    Args:
        trainer: The native trainer that evaluated.
        evaluation: Its evaluation.
    """
    return Evaluation({name: _with_trl_metrics(trainer, each) for name, each in evaluation.sets.items()})


def with_trl_names(metrics: Metrics) -> Metrics:
    """Returns the metrics of an update, with those too that TRL calls otherwise under its names."""
    return {**metrics, "aux_loss": metrics[ROUTER_LOSS]} if ROUTER_LOSS in metrics else metrics


def _with_trl_metrics(trainer: Any, evaluation: SetEvaluation) -> SetEvaluation:
    rollouts = [rollout for group in evaluation.groups for rollout in group]
    settings, names = trainer.args, [reward.name for reward in trainer.rewards]
    advantages = advantages_of(rollouts, names, trainer.reward_weights, evaluation.params.n, settings)
    metrics = reward_metrics(names, reward_matrix(names, rollouts), advantages)
    metrics |= trl_zero_std_frac(advantages, settings.scale_rewards, settings.multi_objective_aggregation)
    scored = [
        replace(rollout, advantage=float(value)) for rollout, value in zip(rollouts, advantages.values, strict=True)
    ]
    measured = with_trl_names(trainer.learner.measure(_rows(trainer, scored, evaluation.params.n)))
    return replace(evaluation, metrics=metrics | measured | evaluation.metrics)


def _rows(trainer: Any, rollouts: Sequence[Rollout], num_generations: int) -> list[Row]:
    learner, settings = trainer.learner, trainer.args
    ends = masked_ends(settings)
    has_correction = settings.rollout_correction != "none"
    numbers: dict[tuple[int, bytes], int] = {}  # rows of one number share the computation of their prompt
    rows = []
    for index, rollout in enumerate(rollouts):
        number = numbers.setdefault((index // num_generations, rollout.prompt_ids.tobytes()), len(numbers))
        rows.append(row_of(rollout, number, ends, has_correction))
    if learner.reference is None or settings.use_kl_in_reward:
        return rows
    shapes = learner.shapes
    try:
        with learner.reference_on_devices() as reference:
            logps = learner.logprobs(reference, rows)[0]
    finally:
        learner.shapes = shapes
    return [replace(row, ref_logp=logp) for row, logp in zip(rows, logps, strict=True)]
