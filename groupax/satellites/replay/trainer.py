"""A trainer that repeats steps of a recorded run in a folder of its own, by the methods that the run went through."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupax.core.config import GRPOConfig
from groupax.core.settings.run import QUIET
from groupax.episodes.record import Record
from groupax.events import Message, StepStarted
from groupax.rollouts.collector import Collector, with_advantages
from groupax.rollouts.pipeline import Policy
from groupax.rollouts.state import Cursor, Experience, Group
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import Identity, describe, differences
from groupax.runs.checkpoints.record import read_policies
from groupax.runs.diagnostics import Diagnose
from groupax.runs.run import Run, RunHooks
from groupax.runs.step_record import Stage
from groupax.runs.trainer import Description, TrainResult
from groupax.satellites.replay.recorded import RecordedRun
from groupax.trainer import GRPOTrainer


class ReplayCollector(Collector):
    """A collector that takes rollouts from a record.

    Args:
        collector: The collector of the run, whose parts it takes.
        run: The recorded run.
        targets: Numbers of the rollouts that are computed again.
        stage: First stage of these rollouts to compute again; what comes before it is recorded.

    Attributes:
        policies: Policies that sample rollouts, by the number of the rollout, where these are not the learner's.
        sampled: Numbers of the rollouts that were sampled.
    """

    def __init__(self, collector: Collector, run: RecordedRun, targets: range, stage: Stage) -> None:
        vars(self).update(vars(collector))
        self.run, self.targets, self.stage = run, targets, stage
        self.policies: dict[int, Policy] = {}
        self.sampled: list[int] = []

    def collect(self, cursor: Cursor) -> Experience:
        """Returns the recorded rollout, or the same one computed again, ready for updates."""
        number = cursor.num_rollouts
        groups = None if self.samples(number) else self._recorded(cursor)
        experience = self._sampled(cursor) if groups is None else self._replayed(groups, cursor)
        return self.with_logprobs(experience, cursor)

    def samples(self, number: int) -> bool:
        """Returns whether a rollout is sampled again although it may be recorded."""
        return number in self.targets and self.stage in ("data", "rollout")

    def needs_policy(self, number: int) -> bool:
        """Returns whether a rollout is sampled, as asked for or because it was not kept."""
        return self.samples(number) or not self.run.keeps(self._steps(number))

    def policy_version(self, number: int) -> int:
        """Returns the number of optimizer steps that the policy of a rollout has seen."""
        return max(0, number * self.schedule.updates_per_rollout - self.args.max_staleness)

    def _steps(self, number: int) -> range:
        size = self.schedule.updates_per_rollout
        return range(number * size + 1, (number + 1) * size + 1)

    def _sampled(self, cursor: Cursor) -> Experience:
        number = cursor.num_rollouts
        self.sampled.append(number)
        self._copy_calls(number)
        policy = self.policies.pop(number, None)
        version = self.policy_version(number) if self.args.max_staleness else cursor.step
        self.engine.params = self.learner.policy if policy is None else self.learner.policy_of(policy.trained)
        experience = self.rollout(self.engine, cursor, version if policy is None else policy.version)
        self.engine.params = self.learner.policy
        self.engine.release()
        return experience

    def _asked(self, number: int) -> bool:
        """Returns whether tools or environments answered in a rollout; True if that is not known."""
        table = next((table for step in self._steps(number) if (table := self.run.table(step)) is not None), None)
        return table is None or self.episodes.rules.has_environments or '"calls": [{' in "".join(table.get("turns", ()))

    def record(self, number: int, is_closed: bool = True) -> Record:
        """Returns the record of a rollout's calls, to which none is added."""
        return super().record(number, is_closed)

    def _copy_calls(self, number: int) -> None:
        """Copies what tools answered into the folder of the replay, where it is looked up.

        Raises:
            ValueError: The answers were not kept.
        """
        folder, files = self.episodes.records(), self.run.calls(number)
        if folder is not None and not files and self._asked(number):
            raise ValueError(
                f"what tools and environments answered in rollout {number} is not in {self.run.folder}/calls any more, "
                "and a replay calls none: start from what was kept of it, with --stage reward or a later one"
            )
        if folder is not None and files:
            folder.mkdir(parents=True, exist_ok=True)
            for path in files:
                shutil.copy(path, folder)

    def _recorded(self, cursor: Cursor) -> list[Group] | None:
        def examples(count: int) -> Sequence[Mapping]:
            return [self.prompts.examples[index] for index in self.visited(cursor.num_prompts, count)]

        groups = self.run.groups(self._steps(cursor.num_rollouts), examples)
        if groups is None or self.prompts.images is None:
            return groups
        images = self.prompts.images_of(self.visited(cursor.num_prompts, len(groups)))
        return [[replace(row, images=images[row.prompt_index]) for row in group] for group in groups]

    def _replayed(self, groups: list[Group], cursor: Cursor) -> Experience:
        """Returns recorded groups as a rollout, with rewards and advantages again where this is asked for."""
        errors: Mapping[str, str] = {}
        num_trained, stage = self.schedule.prompts_per_rollout, self.stage
        is_target = cursor.num_rollouts in self.targets
        if is_target and stage == "reward":
            self.scoring.runner.state = self.trainer_state(cursor)
            scored = self.scoring.runner.score([replace(row, rewards={}) for row in group] for group in groups)
            groups, errors = scored.groups, scored.errors
        if is_target and stage in ("reward", "advantage"):
            trained = groups[:num_trained]
            groups = with_advantages(trained, self.advantages(trained)) + groups[num_trained:]
        return self.experience(groups, cursor, {"time/rollout_s": 0.0, "time/reward_s": 0.0}, errors)


@dataclass(frozen=True)
class Target:
    """A step to replay.

    Attributes:
        run: The recorded run.
        step: The step to repeat.
        stage: First stage of it that is computed again; those before it are taken from the record.
        first: First step that is computed again from this stage on, with all up to `step`; 0 for `step` alone.
    """

    run: RecordedRun
    step: int
    stage: Stage = "data"
    first: int = 0

    @property
    def steps(self) -> range:
        """The steps that are computed again."""
        return range(self.first or self.step, self.step + 1)

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


def first_of_rollout(step: int, args: GRPOConfig) -> int:
    """Returns the number of steps before the rollout that a step trains on."""
    updates = args.updates_per_rollout * args.num_iterations
    return (step - 1) // updates * updates


@contextmanager
def prepared(target: Target, args: GRPOConfig) -> Iterator[GRPOConfig]:
    """Gives the settings of a trainer for a target in a temporary folder, which is deleted at the end.

    Args:
        target: The step to repeat.
        args: The settings that the run had there.

    Raises:
        ValueError: The run was continued with other settings between the checkpoint to start from and the step.
    """
    saved = target.run.checkpoint(first_of_rollout(target.steps[0], args))
    first = 0 if saved is None else saved.step
    for step in target.run.changes:
        if first < step < target.step:
            raise ValueError(
                f"the run was continued with other settings after step {step}, and it has no checkpoint from "
                f"there to the rollout of step {target.step}, so that this step cannot be repeated"
            )
    with tempfile.TemporaryDirectory(prefix="groupax-replay-") as folder:
        resume = "never"
        if saved is not None:  # the only checkpoint of a run folder of its own
            place = Path(folder) / "before" / "checkpoints" / saved.folder.name
            place.parent.mkdir(parents=True)
            place.symlink_to(saved.folder.resolve())
            resume = str(place)
        yield replace(args, **QUIET, output_dir=str(Path(folder) / "run"), resume=resume)


class ReplayTrainer(GRPOTrainer):
    """A `GRPOTrainer` that trains up to a step on recorded rollouts, and repeats that one.

    Args:
        target: What to repeat.
        arguments: Those of `GRPOTrainer`, with the settings that `prepared` gives.
        named: Likewise.

    Attributes:
        first_step: Step after which it started.
    """

    collector: ReplayCollector

    def __init__(self, target: Target, *arguments: Any, **named: Any) -> None:
        self.target, self.first_step = target, 0
        super().__init__(*arguments, **named)
        self.pipeline = None  # rollouts of earlier policies are sampled when they are needed
        self.run.hooks = _ReplayHooks()

    def make_collector(self) -> ReplayCollector:
        """Returns a collector of recorded rollouts."""
        numbers = [(step - 1) // self.schedule.updates_per_rollout for step in self.target.steps]
        targets, target = range(numbers[0], numbers[-1] + 1), self.target
        collector = replace(super().make_collector(), emit=self.emit)
        return ReplayCollector(collector, target.run, targets, target.stage)

    def identity(self) -> Identity:
        """Returns the identity that was saved, if only the data differ or the run was continued with other settings."""
        own, run = super().identity(), self.target.run
        saved = run.checkpoint(first_of_rollout(self.target.steps[0], self.args))
        if saved is None:
            return own
        if saved.step in run.changes:
            return saved.state["identity"]
        found = differences(saved.state["identity"], own)
        data = {name: pair for name, pair in found.items() if name.startswith("train_dataset")}
        if data:
            self.emit(Message(f"the dataset is not that of the run:\n{describe(data)}", warning=True))
        return {**own, "train_dataset": saved.state["identity"]["train_dataset"]}

    def restore(self, saved: Saved) -> None:
        """Continues from a checkpoint, with the policies that sample the rollouts after it."""
        super().restore(saved)
        self.collector.policies = read_policies(saved.folder, saved.state.get("policies", []), self.learner)
        self.first_step = self.cursor.step

    def train(self) -> TrainResult:
        """Takes the steps up to the target."""
        run = self.run
        with run.training() as stop:
            while self.cursor.step < self.target.step:
                stop.check()
                self._keep_policies()
                self.emit(StepStarted(self.cursor.step))
                self.update(self.next_rows())
        return TrainResult(self.cursor.step, run.train_seconds, run.log.rollout_tokens_per_s, run.log.last)

    def _keep_policies(self) -> None:
        """Keeps the present policy if it samples a later rollout."""
        staleness, step = self.args.max_staleness, self.cursor.step
        if not staleness:
            return
        for number in range(self.cursor.num_rollouts, self.collector.targets[-1] + 1):
            is_due = self.collector.policy_version(number) == step and number not in self.collector.policies
            if is_due and self.collector.needs_policy(number):
                self.collector.policies[number] = Policy(step, self.learner.snapshot())

    def diagnose(self) -> Diagnose:
        """Returns what finds nothing: the run has reported what is wrong."""
        return lambda _: {}

    def describe(self) -> Description:
        """Returns the facts of the run, without the warnings that it has given."""
        return replace(super().describe(), warnings=(), findings={})

    def stop_if_nothing_is_scored(self) -> None:
        """Does nothing: the run has continued."""


class _ReplayHooks(RunHooks):
    """Saves nothing at the end."""

    def end(self, run: Run) -> None:
        run.log.close_sinks()
        run.folder.settle()


# Makes a trainer for a target, with these settings.
Make = Callable[[Target, GRPOConfig], ReplayTrainer]
