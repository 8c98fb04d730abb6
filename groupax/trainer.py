"""The trainer: GRPO as in Algorithm 1 of the paper (arXiv:2402.03300).

collect     sample a group of completions for each prompt with the current policy       rollouts/collector.py
score       rewards, group-relative advantages, log-probs of old policy and reference   rewards, objective
update      maximize the objective on the next minibatch of the rollout                 training/learner.py
log, save   events to every sink, checkpoints                                           runs
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from groupax.engine.sequence import Sampler
from groupax.evaluation.evaluate import Evaluation, evaluate
from groupax.events import PhaseStarted, StepStarted, TokenScores
from groupax.parallel.preemption import PreemptionHandler
from groupax.runs.build import eval_params
from groupax.runs.checkpoints.saver import RunSaver
from groupax.runs.guards import stop_if_nothing_is_scored
from groupax.runs.log import RunLog
from groupax.runs.progress.display import headline_text, short_number
from groupax.runs.progress.notebook import result_html
from groupax.runs.rollout_run import RolloutRun
from groupax.runs.step_record import step_record
from groupax.settings.sampling import SamplingParams
from groupax.training.learner import Update
from groupax.types import Metrics, Row


@dataclass(frozen=True)
class TrainResult:
    """The result of `GRPOTrainer.train`.

    Attributes:
        num_steps: Optimizer steps.
        train_seconds: Wall time of the loop with evaluations and checkpoints, without loading and saving the model,
            including that of earlier processes of the run.
        rollout_tokens_per_s: Sampled tokens per second of sampling.
        metrics: Metrics of the last logged step.
    """

    num_steps: int
    train_seconds: float
    rollout_tokens_per_s: float
    metrics: Metrics

    def __repr__(self) -> str:
        """Returns the main figures in one line."""
        figures = f"{self.num_steps:,} steps in {self.train_seconds:.1f} s, {self.rollout_tokens_per_s:,.0f} tokens/s"
        return f"<TrainResult: {figures} of sampling, {headline_text(self.metrics)}>"

    def _repr_html_(self) -> str:
        """Returns the result as a table, for notebooks."""
        more = {"sampled tokens per second": short_number(self.rollout_tokens_per_s)}
        return result_html(self.num_steps, self.train_seconds, self.metrics, more)


class GRPOTrainer(RolloutRun):
    """Trains a language model with Group Relative Policy Optimization.

    Args:
        model: Folder, hub id, or `Model`, whose own weights are not changed.
        reward_funcs: One or several reward functions or reward models, by reference or name (see docs/rewards.md).
        args: Settings; None takes the defaults.
        train_dataset: Prompts: a `datasets.Dataset`, a list of dicts, a file of rows, a folder, or a hub id, with a
            column `prompt` (see docs/datasets.md). The reward functions receive every other column.
        eval_dataset: Held-out prompts for `evaluate` and `eval_steps`, or a dict of several sets by name.
        processing_class: Tokenizer; None takes the one in the model's folder.
        reward_processing_classes: Tokenizers of the reward models, one per entry of `reward_funcs`; None takes each
            model's own.
        peft_config: A `LoRAConfig` or a `peft.LoraConfig`, to train an adapter instead of the model's weights. Without
            it a model that has an adapter continues to train that one.
        listeners: Called with every event of the run (see `groupax.events`); one that returns True ends the run.
        progress: Display of the run; None takes the one that `progress_bar` names.
        tools: Functions that the model may call (see docs/episodes.md). Their docstrings and type hints describe them.
        environments: A class of environments, of which every episode gets one, or a function that creates one; or a
            dict of several by the name in the dataset's column `environment`.
        rollout_func: A function that samples rollouts itself, in the place of turns, tools and environments: it takes a
            `RolloutRequest` and returns a `Trajectory` for each rollout (see docs/episodes.md). A `RolloutFunction`
            also names the columns that it adds for reward functions.

    Raises:
        ValueError: an argument or a setting would fail later.

    Example:
        >>> trainer = GRPOTrainer("Qwen/Qwen3-0.6B", my_reward, train_dataset="prompts.jsonl")  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    # -- Algorithm 1 ---------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Runs the remaining steps, writes the run folder, and saves the trained model in its `model/`.

        Raises:
            DivergedError: `max_bad_steps` updates in a row were not finite. The model of before is saved.
            RewardError: a reward function failed and `reward_errors` is "raise", or it failed for every completion of a
                rollout, or no completion has had a reward in several rollouts or in the whole run.
            PreemptedError: SIGTERM, SIGINT or a notice of maintenance asked the run to stop; its state is saved.
            RunError: the run cannot continue; its state is saved if there is room.
            ValueError: `resume` names a checkpoint that this run cannot continue, or no checkpoint there can be read.
            LockedError: another run works in the folder.
        """
        with self.holding_folder():
            log = self._train()
        return TrainResult(self.cursor.step, self.train_seconds, log.rollout_tokens_per_s, log.last)

    def _loop(self, log: RunLog, saver: RunSaver, stop: PreemptionHandler) -> None:
        while True:
            self._evaluate_if_due(log, stop)
            self._save_if_due(saver)
            if self._is_over(log):
                return
            stop.check()
            self.emit(StepStarted(self.cursor.step))
            if self.pipeline is not None:
                self.pipeline.begin(self.cursor)
            rows = self._next_rows(log, stop)
            update, scores = self._update(rows)
            self._log(log, rows, update, scores)
            self._stop_if_diverged(stop, rows, update)

    def _next_rows(self, log: RunLog, stop: PreemptionHandler) -> list[Row]:
        """Returns the rows of the next update; collects a rollout if the last one is used up."""
        if self.experience is None:
            self._collect(log, stop)
        assert self.experience is not None, "there is a rollout"
        return self.experience.next_rows()

    def _collect(self, log: RunLog, stop: PreemptionHandler, num_wanted: int = 1) -> None:
        """Collects a rollout: completions with rewards, advantages and log-probs."""
        if self.pipeline is not None:
            self.emit(PhaseStarted("waiting for the rollout"))
        with stop.cancellable(), self._shapes_kept():
            experience = (self.pipeline or self.collector).collect(self.cursor, num_wanted)
        self.experience = experience
        self.cursor = replace(
            self.cursor,
            num_rollouts=self.cursor.num_rollouts + 1,
            num_prompts=self.cursor.num_prompts + len(experience.groups),
            num_tokens=self.cursor.num_tokens + experience.num_tokens,
        )
        log.rollout(self.cursor.step, experience.groups, experience.metrics, experience.errors)

    def _update(self, rows: Sequence[Row]) -> tuple[Update, dict[int, TokenScores]]:
        """Runs an optimizer step; also returns its token scores by index into the completions of the last rollout."""
        self._state_before = self.learner.state
        self.emit(PhaseStarted("updating"))
        with self._shapes_kept():
            update = self.learner.update(rows)
            if self.pipeline is None:
                self.engine.params = self.learner.policy  # or it would keep the previous weights
            scores = self._use(update)
        num_bad_steps = 0 if update.applied else self.cursor.num_bad_steps + 1
        self.cursor = replace(self.cursor, step=self.cursor.step + 1, num_bad_steps=num_bad_steps)
        self._state_before = None
        return update, scores

    def _use(self, update: Update) -> dict[int, TokenScores]:
        """Counts the next minibatch of the rollout as used, and drops a rollout that is used up."""
        assert self.experience is not None, "there is a rollout"
        of_rows = zip(self.experience.next_indices(), map(TokenScores, update.logps, update.entropies), strict=True)
        scores = {index: each for index, each in of_rows if index is not None}
        experience = self.experience.after(update.logps)
        self.experience = experience if experience.num_left(self.schedule.num_passes) else None
        return scores

    def _log(self, log: RunLog, rows: Sequence[Row], update: Update, scores: dict[int, TokenScores]) -> None:
        step = self.cursor.step
        staleness = step - 1 - sum(row.policy_version for row in rows) / len(rows)
        log.step(step, update.metrics | {"rollout/staleness": staleness}, scores, update.distributions)
        self.last_metrics = log.last
        self._record(log, rows, update)
        self._stop_if_nothing_is_scored(log)

    def _record(self, log: RunLog, rows: Sequence[Row], update: Update) -> None:
        """Writes the digests of the step, by which a replay of it is compared."""
        record = step_record(self.cursor, log.rollouts, rows, update, self.learner.digest())
        self.run_folder.write_record(record.line())

    def _stop_if_nothing_is_scored(self, log: RunLog) -> None:
        names = [reward.name for reward in self.rewards]
        stop_if_nothing_is_scored(log, self.cursor.step, self.num_steps, self.schedule.updates_per_rollout, names)

    @contextmanager
    def _shapes_kept(self) -> Iterator[None]:
        """Restores the known shapes if the block fails, since the rounding of the next attempt depends on them."""
        shapes = self.learner.shapes
        try:
            yield
        except BaseException:
            self.learner.shapes = shapes
            raise

    # -- evaluation ------------------------------------------------------------------------------------------------

    @property
    def _eval_sampler(self) -> Sampler:
        return self.engine

    def evaluate(self, params: SamplingParams | None = None, eval_dataset: Any = None) -> Evaluation:
        """Samples completions of all prompts of the `eval_dataset`s with the current policy, and scores them.

        Args:
            params: Sampling parameters; None takes the settings `eval_...`.
            eval_dataset: Prompts to evaluate on instead of the trainer's, in any form that it takes.

        Raises:
            ValueError: There are no prompts, or they lack a column that a reward function takes.
        """
        sets = self.eval_prompts if eval_dataset is None else self.encode_eval_sets(eval_dataset)
        if not sets:
            raise ValueError("there is no eval_dataset to evaluate on; give one to GRPOTrainer or to evaluate")
        if self.pipeline is not None:
            self.pipeline.settle()
        self.engine.params = self.learner.policy
        params = params or eval_params(self.args)
        step = self.cursor.step
        when = "after training" if step >= self.num_steps else f"at step {step}" if step else "before training"
        with self.progress, self.reward_runner as runner:
            self._introduce()
            runner.state = self.collector.trainer_state(self.cursor)
            inputs = self.tokenizer, runner, self.reward_weights
            of_sets = {
                name: evaluate(
                    self._eval_sampler,
                    *inputs,
                    prompts,
                    params,
                    self.correctness_reward,
                    self.emit,
                    f"evaluating {when}: {name}",
                    self.rules,
                )
                for name, prompts in sets.items()
            }
        if self.pipeline is None:
            self.engine.release()
        if eval_dataset is None:  # the model's card compares the same sets before and after
            self.estimates[self.cursor.step] = {name: each.estimates for name, each in of_sets.items()}
        return Evaluation(of_sets)
