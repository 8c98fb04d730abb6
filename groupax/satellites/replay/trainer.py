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
from groupax.core.types import Rollout, Row
from groupax.episodes.record import Record
from groupax.events import Message, StepStarted
from groupax.rollouts.collector import Collector, with_advantages
from groupax.rollouts.pipeline import Policy
from groupax.rollouts.state import Cursor, Experience, Group
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import Identity, describe, differences
from groupax.runs.checkpoints.record import read_policies
from groupax.runs.diagnostics import Diagnose
from groupax.runs.log import RunLog
from groupax.runs.run import Run, RunHooks
from groupax.runs.step_record import Stage, StepRecord
from groupax.runs.trainer import Description
from groupax.satellites.replay.recorded import RecordedRun
from groupax.trainer import GRPOTrainer, TrainResult


@dataclass(frozen=True, eq=False)
class Moment:
    """A run before an update.

    Attributes:
        rows: Rows of the update.
        indices: Index of each row's completion among those of the rollout; a further stream of an episode has None.
        experience: The rollout that the rows are of.
    """

    rows: Sequence[Row]
    indices: Sequence[int | None]
    experience: Experience

    @property
    def completions(self) -> list[Rollout]:
        """The completions of the rollout."""
        return [rollout for group in self.experience.groups for rollout in group]

    def parts(self) -> dict[int, list[int]]:
        """Returns the indices of the rows of each completion, by the completion's index."""
        parts: dict[int, list[int]] = {}
        number = 0
        for row, index in enumerate(self.indices):
            number = number if index is None else index
            parts.setdefault(number, []).append(row)
        return parts


class ReplayCollector(Collector):
    """A collector that takes rollouts from a record.

    Args:
        collector: The collector of the run, whose parts it takes.
        run: The recorded run.
        targets: Numbers of the rollouts that are computed again.
        stage: First stage of these rollouts to compute again; what comes before it is recorded.
        makes_calls: Whether tools and environments are called for what is not in the record, as under changes.

    Attributes:
        policies: Policies that sample rollouts, by the number of the rollout, where these are not the learner's.
        sampled: Numbers of the rollouts that were sampled.
    """

    def __init__(self, collector: Collector, run: RecordedRun, targets: range, stage: Stage, makes_calls: bool) -> None:
        vars(self).update(vars(collector))
        self.run, self.targets, self.stage, self.makes_calls = run, targets, stage, makes_calls
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

    def record(self, number: int, is_closed: bool = False) -> Record:
        """Returns the record of a rollout's calls, to which none is added unless it may be made."""
        return super().record(number, is_closed or not self.makes_calls)

    def _copy_calls(self, number: int) -> None:
        """Copies what tools answered into the folder of the replay, where it is looked up.

        Raises:
            ValueError: The answers were not kept, and no call may be made.
        """
        folder, files = self.episodes.records(), self.run.calls(number)
        if folder is not None and not files and not self.makes_calls and self._asked(number):
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


SettingsAt = Callable[[int], GRPOConfig]  # the settings of a run at a step


@dataclass(frozen=True)
class Target:
    """A step to replay.

    Attributes:
        run: The recorded run.
        step: The step to repeat.
        stage: First stage of it that is computed again; those before it are taken from the record.
        first: First step that is computed again from this stage on, with all up to `step`; 0 for `step` alone.
        is_changed: Whether it is repeated under changes, so that it need not be the same run.
        identity: Identity of the run whose state it starts from, if its settings differ from that.
        saves: Whether the state after the step is saved.
    """

    run: RecordedRun
    step: int
    stage: Stage = "data"
    first: int = 0
    is_changed: bool = False
    identity: Identity | None = None
    saves: bool = False

    @property
    def record(self) -> StepRecord:
        """The digests of the step."""
        return self.run.records[self.step]

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
def prepared(target: Target, make: "Make", settings: SettingsAt) -> Iterator[tuple[Target, GRPOConfig]]:
    """Gives a target and the settings of a trainer for it in a temporary folder, which is deleted at the end.

    Where a process continued the run with other settings, the steps before it are repeated with those that they had.

    Args:
        target: The step to repeat.
        make: Makes a trainer.
        settings: Returns the settings of the run at a step.
    """
    start = first_of_rollout(target.steps[0], settings(target.steps[0]))
    saved = target.run.checkpoint(start)
    with tempfile.TemporaryDirectory(prefix="groupax-replay-") as folder:
        resume, first = "never", 0
        if saved is not None:  # a checkpoint or a state, which has another place
            resume, first = str(link_checkpoint(saved, Path(folder) / "before")), saved.step
            if first in target.run.changes and target.identity is None:
                target = replace(target, identity=saved.state["identity"])
        for step in target.run.changes:
            if first < step < target.step:
                stage = target.stage if step > start else "update"
                before = Target(target.run, step, stage, identity=target.identity, saves=True)
                place = str(Path(folder) / f"until_{step}")
                identity = trained(before, make, replace(settings(step), **QUIET, output_dir=place, resume=resume))
                resume, target = place, replace(target, identity=identity)
        yield target, replace(settings(target.step), **QUIET, output_dir=str(Path(folder) / "run"), resume=resume)


def trained(target: Target, make: "Make", args: GRPOConfig) -> Identity:
    """Repeats the steps up to a target, and returns the identity of that run."""
    trainer = make(target, args)
    trainer.train()
    return trainer.run.identity


def link_checkpoint(saved: Saved, run: Path) -> Path:
    """Makes a checkpoint the only one of a new run folder, and returns its path there."""
    place = run / "checkpoints" / saved.folder.name
    place.parent.mkdir(parents=True)
    place.symlink_to(saved.folder.resolve())
    return place


class ReplayTrainer(GRPOTrainer):
    """A `GRPOTrainer` that trains up to a step on recorded rollouts, and repeats that one.

    Args:
        target: What to repeat.
        arguments: Those of `GRPOTrainer`, with `replay_settings`.
        named: Likewise.

    Attributes:
        first_step: Step after which it started.
        observe: Called with the number of each step that is computed again and the moment before it, if it is set.
        finish: Called after the last step, while rewards can be computed, if it is set.
    """

    collector: ReplayCollector
    observe: Callable[[int, Moment], None] | None = None
    finish: Callable[[], None] | None = None

    def __init__(self, target: Target, *arguments: Any, **named: Any) -> None:
        target.check()
        self.target, self.first_step = target, 0
        super().__init__(*arguments, **named)
        self.pipeline = None  # rollouts of earlier policies are sampled when they are needed
        self.run.hooks = _ReplayHooks()

    def make_collector(self) -> ReplayCollector:
        """Returns a collector of recorded rollouts."""
        numbers = [(step - 1) // self.schedule.updates_per_rollout for step in self.target.steps]
        targets, target = range(numbers[0], numbers[-1] + 1), self.target
        collector = replace(super().make_collector(), emit=self.emit)
        return ReplayCollector(collector, target.run, targets, target.stage, makes_calls=target.is_changed)

    def identity(self) -> Identity:
        """Returns the identity that was saved, if only the data differ; says so then."""
        own = super().identity()
        if self.target.identity is not None:
            return self.target.identity
        saved = self.target.run.checkpoint(self.target.step)
        if saved is None or self.target.is_changed:
            return own
        found = differences(saved.state["identity"], own)
        data = {name: pair for name, pair in found.items() if name.startswith("train_dataset")}
        if data:
            self.emit(Message(f"the dataset is not that of the run:\n{describe(data)}", warning=True))
        return {**own, "train_dataset": saved.state["identity"]["train_dataset"]}

    def restore(self, saved: Saved, log: RunLog) -> None:
        """Continues from a checkpoint, with the policies that sample the rollouts after it."""
        policies = read_policies(saved.folder, saved.state.get("policies", []), self.learner)
        super().restore(saved, log)
        self.collector.policies = policies
        self.first_step = self.cursor.step

    def train(self) -> TrainResult:
        """Takes the steps up to the target."""
        run = self.run
        with run.training() as stop:
            while self.cursor.step < self.target.step:
                stop.check()
                self._step()
            self._keep_policies()
            if self.target.saves:
                run.saver.save_and_wait()
            if self.finish is not None:
                self.finish()
        return TrainResult(self.cursor.step, run.train_seconds, run.log.rollout_tokens_per_s, run.log.last)

    def _step(self) -> None:
        self._keep_policies()
        self.emit(StepStarted(self.cursor.step))
        rows = self.next_rows()
        if self.observe is not None and self.cursor.step + 1 in self.target.steps:
            found = self.experience
            assert found is not None, "there is a rollout"
            self.observe(self.cursor.step + 1, Moment(rows, found.next_indices(), found))
        self.update(rows)

    def _keep_policies(self) -> None:
        """Keeps the present policy if it samples a later rollout, or one after the state that is saved."""
        staleness, step = self.args.max_staleness, self.cursor.step
        if not staleness:
            return
        last = self.collector.targets[-1]
        after = last + 1 + staleness if self.target.saves else last
        for number in range(self.cursor.num_rollouts, after + 1):
            is_due = self.collector.policy_version(number) == step and number not in self.collector.policies
            if is_due and (number > last or self.collector.needs_policy(number)):
                self.collector.policies[number] = Policy(step, self.learner.snapshot())

    def policies(self, cursor: Cursor) -> Mapping[int, Policy]:
        """Returns the earlier policies that sample coming rollouts."""
        kept = self.collector.policies.items()
        return {number: policy for number, policy in kept if number >= cursor.num_rollouts}

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
