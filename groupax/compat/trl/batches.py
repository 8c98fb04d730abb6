"""TRL's batch arithmetic, in which an optimizer step may take parts of several rollouts, and its metrics.

The core trains on whole minibatches of one rollout. TRL counts micro-batches: a step takes
`gradient_accumulation_steps` of them and a rollout has `steps_per_generation`, in any ratio.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import Metrics, Rollout, Row
from groupax.evaluation.evaluate import Evaluation, SetEvaluation
from groupax.events import TokenScores
from groupax.parallel.preemption import PreemptionHandler
from groupax.rewards.contract import reward_matrix
from groupax.rollouts.collector import advantages_of
from groupax.rollouts.completions import reward_metrics, trl_zero_std_frac
from groupax.rollouts.state import Cursor, Experience, UpdateSchedule, masked_ends, row_of
from groupax.runs.build import eval_params
from groupax.runs.checkpoints.fingerprint import Identity
from groupax.trainer import GRPOTrainer
from groupax.training.learner import Update
from groupax.training.shapes import Shape
from groupax.training.step import ROUTER_LOSS


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


@dataclass(frozen=True)
class TRLSchedule(UpdateSchedule):
    """A schedule whose optimizer steps take several minibatches, of one rollout or of several.

    Attributes:
        minibatches_per_step: Minibatches that an optimizer step takes; the last step of an epoch may take fewer.
    """

    minibatches_per_step: int = 1

    @property
    def rows_per_step(self) -> int:
        """Completions of an optimizer step."""
        return self.rows * self.minibatches_per_step

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps on each rollout, in all passes."""
        return super().updates_per_rollout // self.minibatches_per_step

    def prompts_per_epoch(self, num_examples: int) -> int:
        """Returns the number of prompts that an epoch visits."""
        if num_examples < self.prompts_per_rollout:
            raise ValueError(
                f"the dataset has {num_examples} prompts and a generation takes {self.prompts_per_rollout} "
                "(generation_batch_size / num_generations), so that an epoch has none; lower "
                "per_device_train_batch_size, gradient_accumulation_steps or steps_per_generation"
            )
        return super().prompts_per_epoch(num_examples)

    def num_steps(self, num_examples: int, num_epochs: float | int, max_steps: int) -> int:
        """Returns the optimizer steps of a run; every epoch ends with a step, however few minibatches are left."""
        rollouts = self.prompts_per_epoch(num_examples) // self.prompts_per_rollout
        minibatches = rollouts * self.minibatches * self.num_passes
        steps_per_epoch = math.ceil(minibatches / self.minibatches_per_step)
        return max_steps if max_steps > 0 else math.ceil(num_epochs * steps_per_epoch)


def trl_schedule(rows: int, accumulated: int, generated: int, num_generations: int, num_passes: int) -> TRLSchedule:
    """Returns the schedule of TRL's settings.

    Args:
        rows: Completions of a micro-batch, over all devices.
        accumulated: Micro-batches of an optimizer step.
        generated: Micro-batches of a rollout.
        num_generations: Completions per prompt.
        num_passes: Passes over each rollout.
    """
    divisor = math.gcd(accumulated, generated)
    return TRLSchedule(
        prompts_per_rollout=rows * generated // num_generations,
        minibatches=generated // divisor,
        rows=rows * divisor,
        num_passes=num_passes,
        drop_last=True,
        minibatches_per_step=accumulated // divisor,
    )


class TRLBatchTrainer(GRPOTrainer):
    """A trainer whose optimizer steps may take rows of several rollouts.

    Args:
        schedule: How rollouts become optimizer steps.
        arguments: Those of `groupax.GRPOTrainer`, as `named` are.
        revise_line: Revises a line of the log, for a subclass of TRL's trainer; None if it does not.
    """

    schedule: TRLSchedule
    eval_batch_size: int | None = None  # completions of a reward function's call in evaluations; None for all

    def __init__(
        self,
        schedule: TRLSchedule,
        *arguments: Any,
        revise_line: Callable[[int, Metrics], Metrics] | None = None,
        **named: Any,
    ) -> None:
        self._schedule, self._revise_line = schedule, revise_line
        # while a step takes rows of several rollouts: the state at its start, with the known shapes
        self._step_start: tuple[Cursor, Experience | None, list[Shape]] | None = None
        self._num_earlier = 0  # rows of earlier rollouts in the step
        super().__init__(*arguments, **named)

    def make_schedule(self) -> TRLSchedule:
        """Returns TRL's schedule."""
        return self._schedule

    @contextmanager
    def working(self, stop: PreemptionHandler) -> Iterator[None]:
        """Starts what only runs during training; lines of the log are revised from then on."""
        if self._revise_line is not None:
            self.run.log.revise = self._revise_line
        with super().working(stop):
            yield

    def evaluate(self, params: SamplingParams | None = None, eval_dataset: Any = None) -> Evaluation:
        """Evaluates like the native trainer, with TRL's metrics too: the loss, and what belongs to it."""
        n = (params or eval_params(self.args)).n
        self.reward_runner.groups_per_call = self.eval_batch_size and max(1, self.eval_batch_size // n)
        try:
            sets = super().evaluate(params, eval_dataset).sets
            return Evaluation({name: with_trl_metrics(self, each) for name, each in sets.items()})
        finally:
            self.reward_runner.groups_per_call = None

    def log(self, rows: Sequence[Row], update: Update, scores: Mapping[int, TokenScores]) -> None:
        """Logs an optimizer step, with the names that TRL has for metrics too."""
        super().log(rows, replace(update, metrics=with_trl_names(update.metrics)), scores)

    def stop_if_nothing_is_scored(self) -> None:
        """Does nothing: TRL trains on, and `trainer.warn_about_rewards` warns as it does."""

    def identity(self) -> Identity:
        """Returns what a resumed run must have in common with this one, as the schedule."""
        return {**super().identity(), "schedule": asdict(self.schedule)}

    def next_rows(self) -> list[Row]:
        """Returns the rows of the next update, of as many rollouts as it takes."""
        rows: list[Row] = []
        while self._num_left < (missing := self._missing(rows)):
            if self.experience is not None:
                if self.cursor.num_prompts % self.schedule.prompts_per_epoch(len(self.prompts)) == 0:
                    break  # an epoch ends with a step
                self._begin_step()
                rows += _after_groups(rows, self.experience.next_rows(self._num_left))
                self.experience = None
            else:
                if rows or self.schedule.minibatches * self.schedule.num_passes < missing:
                    self._begin_step()
                self.collect(missing)
        self._num_earlier = len(rows)
        assert self.experience is not None, "there is a rollout"
        return rows + _after_groups(rows, self.experience.next_rows(min(self._num_left, missing)))

    def count_as_used(self, update: Update) -> dict[int, TokenScores]:
        """Counts the rows of an update as used, of which only those of the last rollout have scores."""
        assert self.experience is not None, "there is a rollout"
        first = self._num_earlier
        num = (len(update.logps) - first) // self.schedule.rows
        scores = map(TokenScores, update.logps[first:], update.entropies[first:])
        of_rows = zip(self.experience.next_indices(num), scores, strict=True)
        by_index = {index: each for index, each in of_rows if index is not None}
        self.experience = self.experience.after(update.logps[first:], self.schedule.num_passes, num)
        self._step_start = None
        return by_index

    def settle(self) -> None:
        """Returns to the start of a step that has taken rows of several rollouts, which will be repeated."""
        if self._step_start is not None:
            self.cursor, self.experience, self.learner.shapes = self._step_start
            self._step_start = None
            self.run.log.forget_rollouts()

    def _begin_step(self) -> None:
        self._step_start = self._step_start or (self.cursor, self.experience, self.learner.shapes)

    def _missing(self, rows: Sequence[Row]) -> int:
        """Returns the number of minibatches that the step still needs."""
        return self.schedule.minibatches_per_step - len(rows) // self.schedule.rows

    @property
    def _num_left(self) -> int:
        return self.experience.num_left(self.schedule.num_passes) if self.experience else 0


def _after_groups(rows: Sequence[Row], more: Sequence[Row]) -> list[Row]:
    """Returns the rows of another rollout with groups that differ from those of `rows`."""
    first = 1 + max((row.group for row in rows), default=-1)
    return [replace(row, group=row.group + first) for row in more] if rows else list(more)
