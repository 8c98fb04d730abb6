"""A trainer that repeats steps of a recorded run in a folder of its own, by the methods that the run went through."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupax.config import GRPOConfig
from groupax.events import Message, StepStarted
from groupax.parallel.preemption import PreemptionHandler
from groupax.replay.collector import ReplayCollector
from groupax.replay.recorded import RecordedRun
from groupax.rollouts.pipeline import Policy
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import Identity, describe, differences
from groupax.runs.checkpoints.record import read_policies
from groupax.runs.checkpoints.saver import RunSaver
from groupax.runs.log import RunLog
from groupax.runs.step_record import Stage, StepRecord
from groupax.trainer import GRPOTrainer

# Settings of what a replay neither does nor shows.
QUIET: dict[str, Any] = {
    "eval_steps": 0,
    "report_to": (),
    "save_steps": 0,
    "save_interval_minutes": 0.0,
    "do_last_save": False,
    "metric_for_best_model": None,
    "profile": 0,
    "logging_steps": 1,
    "log_completions": True,
    "log_completions_steps": 1,
    "rollout_log_gb": None,
    "rollout_servers": (),
    "rollout_folder": None,
}


@dataclass(frozen=True)
class Target:
    """What is replayed.

    Attributes:
        run: The recorded run.
        step: The step to repeat.
        stage: First stage of it that is computed again; those before it are taken from the record.
    """

    run: RecordedRun
    step: int
    stage: Stage = "data"

    @property
    def record(self) -> StepRecord:
        """The digests of the step."""
        return self.run.records[self.step]

    def check(self) -> None:
        """Checks that the step was recorded.

        Raises:
            ValueError: It was not.
        """
        steps = self.run.records
        if self.step not in steps:
            raise ValueError(
                f"step {self.step} is not in the record of {self.run.folder}, which has the steps {min(steps)} to "
                f"{max(steps)}"
            )


@contextmanager
def replay_settings(target: Target, args: GRPOConfig) -> Iterator[GRPOConfig]:
    """Gives the settings of a run that repeats a step in a temporary folder, which is deleted at the end."""
    updates = args.updates_per_rollout * args.num_iterations
    first = (target.step - 1) // updates * updates  # before its rollout
    saved = target.run.checkpoint(first)
    with tempfile.TemporaryDirectory(prefix="groupax-replay-") as folder:
        resume = "never" if saved is None else str(saved.folder)
        yield replace(args, **QUIET, output_dir=str(Path(folder) / "run"), resume=resume)


class ReplayTrainer(GRPOTrainer):
    """A `GRPOTrainer` that trains up to a step on recorded rollouts, and repeats that one.

    Args:
        target: What to repeat.
        arguments: Those of `GRPOTrainer`, with `replay_settings`.
        named: Likewise.

    Attributes:
        first_step: Step after which it started.
    """

    collector: ReplayCollector

    def __init__(self, target: Target, *arguments: Any, **named: Any) -> None:
        target.check()
        self.target, self.first_step = target, 0
        super().__init__(*arguments, **named)

    def _build_parts(self) -> None:
        super()._build_parts()
        self.pipeline = None  # rollouts of earlier policies are sampled when they are needed
        number = (self.target.step - 1) // self.schedule.updates_per_rollout
        collector = ReplayCollector(self.collector, self.target.run, number, self.target.stage)
        collector.emit = self.emit
        self.collector = collector

    def _describe(self) -> Identity:
        """Returns the identity that was saved, if only the data differ; says so then."""
        own = super()._describe()
        saved = self.target.run.checkpoint(self.target.step)
        if saved is None:
            return own
        found = differences(saved.state["identity"], own)
        data = {name: pair for name, pair in found.items() if name.startswith("train_dataset")}
        if data:
            self.emit(Message(f"the dataset is not that of the run:\n{describe(data)}", warning=True))
        return {**own, "train_dataset": saved.state["identity"]["train_dataset"]}

    def _restore(self, saved: Saved, log: RunLog) -> None:
        policies = read_policies(saved.folder, saved.state.get("policies", []), self.learner)
        super()._restore(saved, log)
        self.collector.policies = policies
        self.first_step = self.cursor.step

    def _loop(self, log: RunLog, saver: RunSaver, stop: PreemptionHandler) -> None:
        while self.cursor.step < self.target.step:
            stop.check()
            self._step(log, stop)

    def _step(self, log: RunLog, stop: PreemptionHandler) -> None:
        self._keep_policy()
        self.emit(StepStarted(self.cursor.step))
        rows = self._next_rows(log, stop)
        update, scores = self._update(rows)
        self._log(log, rows, update, scores)

    def _keep_policy(self) -> None:
        """Keeps the present policy if it samples a later rollout."""
        staleness, step = self.args.max_staleness, self.cursor.step
        if not staleness:
            return
        for number in range(self.cursor.num_rollouts, self.collector.target + 1):
            is_due = self.collector.policy_version(number) == step and number not in self.collector.policies
            if is_due and self.collector.needs_policy(number):
                self.collector.policies[number] = Policy(step, self.learner.snapshot())

    def _stop_if_nothing_is_scored(self, log: RunLog) -> None:
        """Does nothing: the run has continued."""

    def _end(self, log: RunLog, saver: RunSaver, stop: PreemptionHandler) -> None:
        log.close_sinks()
        self.run_folder.settle()
