"""TRL's batches and metrics: a native trainer whose schedule counts micro-batches and whose evaluations have a loss."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from groupax.core.schedule import UpdateSchedule
from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import Metrics, Row
from groupax.evaluation.evaluate import Evaluation, SetEvaluation
from groupax.events import TokenScores
from groupax.rewards.contract import reward_matrix
from groupax.rollouts.collector import advantages_of, with_advantages
from groupax.rollouts.completions import reward_metrics, trl_zero_std_frac
from groupax.runs.checkpoints.fingerprint import Identity
from groupax.trainer import GRPOTrainer
from groupax.training.accumulator import ROUTER_LOSS
from groupax.training.learner import Update


def with_trl_names(metrics: Metrics) -> Metrics:
    """Returns the metrics of an update, with those too that TRL calls otherwise under its names."""
    return {**metrics, "aux_loss": metrics[ROUTER_LOSS]} if ROUTER_LOSS in metrics else metrics


def with_trl_metrics(trainer: Any, evaluation: SetEvaluation) -> SetEvaluation:
    """Returns an evaluation with the loss and the other metrics of an update, and the spread of the rewards."""
    rollouts = [rollout for group in evaluation.groups for rollout in group]
    settings, names = trainer.args, [reward.name for reward in trainer.rewards]
    advantages = advantages_of(rollouts, names, trainer.reward_weights, evaluation.params.n, settings)
    metrics = reward_metrics(names, reward_matrix(names, rollouts), advantages)
    metrics |= trl_zero_std_frac(advantages, settings.scale_rewards, settings.multi_objective_aggregation)
    minibatches = trainer.collector.cut(with_advantages(evaluation.groups, advantages))
    rows = _with_reference(trainer, [row for minibatch in minibatches for row in minibatch])
    measured = with_trl_names(trainer.learner.measure(rows))
    return replace(evaluation, metrics=metrics | measured | evaluation.metrics)


def _with_reference(trainer: Any, rows: list[Row]) -> list[Row]:
    learner = trainer.learner
    if learner.reference is None or trainer.args.use_kl_in_reward:
        return rows
    shapes = learner.shapes
    try:
        with learner.reference_on_devices() as reference:
            logps = learner.logprobs(reference, rows)[0]
    finally:
        learner.shapes = shapes
    return [replace(row, ref_logp=logp) for row, logp in zip(rows, logps, strict=True)]


def trl_schedule(rows: int, accumulated: int, generated: int, num_generations: int, num_passes: int) -> UpdateSchedule:
    """Returns the schedule of TRL's settings.

    Args:
        rows: Completions of a micro-batch, over all devices.
        accumulated: Micro-batches of an optimizer step.
        generated: Micro-batches of a rollout, a multiple of `accumulated`.
        num_generations: Completions per prompt.
        num_passes: Passes over each rollout.
    """
    return UpdateSchedule(
        prompts_per_rollout=rows * generated // num_generations,
        minibatches=generated // accumulated,
        rows=rows * accumulated,
        num_passes=num_passes,
        drop_last=True,
    )


class TRLBatchTrainer(GRPOTrainer):
    """A trainer with TRL's schedule, in which minibatches may cut groups, and with its metrics.

    Args:
        schedule: How rollouts become optimizer steps.
        arguments: Those of `groupax.GRPOTrainer`, as `named` are.
    """

    def __init__(self, schedule: UpdateSchedule, *arguments: Any, **named: Any) -> None:
        self._schedule = schedule
        super().__init__(*arguments, **named)

    def make_schedule(self) -> UpdateSchedule:
        """Returns TRL's schedule."""
        return self._schedule

    def evaluate(self, params: SamplingParams | None = None, eval_dataset: Any = None) -> Evaluation:
        """Evaluates like the native trainer, with TRL's metrics too: the loss, and what belongs to it."""
        sets = super().evaluate(params, eval_dataset).sets
        return Evaluation({name: with_trl_metrics(self, each) for name, each in sets.items()})

    def log(self, rows: Sequence[Row], update: Update, scores: Mapping[int, TokenScores]) -> None:
        """Logs an optimizer step, with the names that TRL has for metrics too."""
        super().log(rows, replace(update, metrics=with_trl_names(update.metrics)), scores)

    def identity(self) -> Identity:
        """Returns what a resumed run must have in common with this one, as the schedule."""
        return {**super().identity(), "schedule": asdict(self.schedule)}
