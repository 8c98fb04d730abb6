"""A step of a recorded run, computed again: by the same settings, or under changes."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from groupax.config import GRPOConfig
from groupax.replay.compare import Columns, StageResult, compare_step
from groupax.replay.moves import observe_move
from groupax.replay.recorded import QUIET, UNSEEN, RecordedRun
from groupax.replay.shares import Shares, observe_shares
from groupax.replay.trainer import (
    Make,
    ReplayTrainer,
    SettingsAt,
    Target,
    first_of_rollout,
    link_checkpoint,
    prepared,
    trained,
)
from groupax.runs.checkpoints.fingerprint import process_of
from groupax.runs.step_record import STAGES, Stage, StepRecord
from groupax.settings.compute import UpdateSettings
from groupax.settings.fields import nearest
from groupax.settings.objective import (
    AdvantageSettings,
    EntropySettings,
    MaskSettings,
    ObjectiveSettings,
    ReferenceSettings,
)
from groupax.settings.optimizer import LearningRateSettings, OptimizerSettings
from groupax.settings.sampling import RolloutSamplingSettings
from groupax.terminal.printable import printable

OF_INPUTS = ("data", "rollout", "reward", "advantage")  # stages whose results are recorded as they were
# Settings by which steps are numbered, and those that the saved weights and optimizer state depend on.
OF_SCHEDULE = (
    "seed",
    "num_iterations",
    "updates_per_rollout",
    "max_staleness",
    "prompt_order",
    "drop_last",
    "adapters",
)
OF_SHAPES = (
    *("lora_r", "lora_target_modules", "lora_bias", "lora_modules_to_save", "base_weights", "dtype", "optimizer"),
    *("momentum", "freeze_vision_tower"),
)
OF_UPDATES = (
    *(ObjectiveSettings, EntropySettings, MaskSettings, ReferenceSettings, UpdateSettings),
    *(LearningRateSettings, OptimizerSettings),
)


@dataclass(frozen=True)
class Outcome:
    """A step that was computed again.

    Attributes:
        target: The step.
        first_step: Step after which the replay started.
        record: Its digests.
        columns: Its completions, as in the rollout log.
        metrics: Its metrics.
        stages: Comparison with the run's.
        parted_at: First earlier step whose weights were not the run's; None if they all were.
        sampled: Earlier rollouts that were sampled again because they were not kept, by number.
        machine: How the machine and the libraries differ from those of the run.
        shares: The shares of its rows in the gradient, if they were asked for.
        moves: Of a step under changes with the same tokens: the KL between the policies before and after the update, in
            the run and under changes.
    """

    target: Target
    first_step: int
    record: StepRecord
    columns: Columns
    metrics: Mapping[str, Any]
    stages: tuple[StageResult, ...]
    parted_at: int | None
    sampled: tuple[int, ...]
    machine: tuple[str, ...]
    shares: Shares | None = None
    moves: tuple[float, ...] = ()

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.target.step

    @property
    def is_equal(self) -> bool:
        """True if every stage has the bits of the run."""
        return self.parted_at is None and all(stage.is_equal for stage in self.stages)

    def __str__(self) -> str:
        from groupax.replay.show import outcome_lines

        return "\n".join(map(printable, outcome_lines(self)))


def target_of(run: RecordedRun, step: int, stage: Stage | None = None) -> Target:
    """Returns a step as the target of a replay.

    Args:
        run: The recorded run.
        step: The step.
        stage: First stage to compute again; None for all, but for completions that servers have sampled.
    """
    is_served = bool(run.settings(step).get("rollout_servers"))
    return Target(run, step, stage or ("reward" if is_served else "data"))


def replay_target(
    target: Target,
    make: Make,
    settings: SettingsAt,
    use: Callable[[ReplayTrainer], Any] | None = None,
    weights_text: Callable[[ReplayTrainer], str] | None = None,
    why: bool = False,
) -> Outcome:
    """Computes a step again and compares it with its record.

    Args:
        target: The step.
        make: Makes the trainer of the run.
        settings: Returns the settings of the run at a step.
        use: Called with the trainer before it starts.
        weights_text: Returns how its weights differ from those of the run, where these are known.
        why: Whether to compute the shares of its rows in the gradient.

    Raises:
        ValueError: The step was not recorded, or the run is another one.
    """
    shares: list[Shares] = []

    def prepare(trainer: ReplayTrainer) -> None:
        if use is not None:
            use(trainer)
        if why:
            observe_shares(trainer, shares)

    outcome = replay_steps(target, make, settings, prepare, weights_text)[-1]
    if shares and not all(stage.is_equal for stage in outcome.stages if stage.stage in OF_INPUTS):
        replay_steps(replace(target, stage="loss"), make, settings, prepare)  # the rows that it had
    return replace(outcome, shares=shares[-1]) if shares else outcome


def replay_steps(
    target: Target,
    make: Make,
    settings: SettingsAt,
    use: Callable[[ReplayTrainer], Any] | None = None,
    weights_text: Callable[[ReplayTrainer], str] | None = None,
) -> list[Outcome]:
    """Computes the steps of a target again, as `replay_target` does, and returns an outcome of each."""
    target.check()
    with prepared(target, make, settings) as (ready, args):
        trainer = make(ready, args)
        if use is not None:
            use(trainer)
        trainer.train()
        outcomes = [outcome_of(replace(target, step=step, first=target.steps[0]), trainer) for step in target.steps]
        text = "" if weights_text is None or outcomes[-1].is_equal else weights_text(trainer)
        return [*outcomes[:-1], with_weights_text(outcomes[-1], text) if text else outcomes[-1]]


def with_weights_text(outcome: Outcome, text: str) -> Outcome:
    """Returns an outcome whose last stage says how the weights differ."""
    *stages, update = outcome.stages
    return replace(outcome, stages=(*stages, replace(update, text=text)))


def settings_of(run: RecordedRun, args: GRPOConfig | None = None) -> SettingsAt:
    """Returns the settings to replay a step of a run with: those given, or those that it had, without a display."""
    return lambda step: args or replace(GRPOConfig.from_mapping(run.settings(step)), progress_bar="none")


def outcome_of(target: Target, trainer: ReplayTrainer) -> Outcome:
    """Returns what a trainer has computed of its target."""
    now = RecordedRun(trainer.run_folder.path)
    step, then = target.step, target.run.records
    before = first_of_rollout(target.steps[0], trainer.args)
    columns = now.table(step) or {}
    stages = compare_step(then[step], now.records[step], target.run.table(step), columns)
    parted = (s for s in sorted(now.records) if s <= before and s in then and now.records[s].update != then[s].update)
    return Outcome(
        target,
        trainer.first_step,
        now.records[step],
        columns,
        next(line for line in now.metrics if line["step"] == step),
        tuple(stages),
        next(parted, None),
        tuple(number for number in trainer.collector.sampled if number not in trainer.collector.targets),
        tuple(target.run.machine_changes(step, process_of(trainer.learner.mesh))),
    )


def stage_of(changed: str) -> Stage:
    """Returns the first stage that a setting changes."""
    if changed == "max_completion_length" or changed in {each.name for each in fields(RolloutSamplingSettings)}:
        return "rollout"
    if any(changed in {each.name for each in fields(part)} for part in OF_UPDATES):
        return "loss"
    if changed == "reward_weights" or changed in {each.name for each in fields(AdvantageSettings)}:
        return "advantage"
    return "rollout"


def changed_settings(changes: Mapping[str, Any], args: GRPOConfig, other_weights: bool = False) -> Mapping[str, Any]:
    """Returns settings that differ, as values of their types.

    Args:
        changes: The settings by name.
        args: Settings of the run.
        other_weights: Whether the weights are others, whose shapes may differ.

    Raises:
        ValueError: One is no setting, has a value of another type, or cannot differ in a step.
    """
    known = [each.name for each in fields(GRPOConfig)]
    for name in changes:
        if name not in known:
            raise ValueError(f"{name!r} is no setting of groupax train{nearest(name, known)}")
        if name in UNSEEN:
            raise ValueError(f"{name} changes nothing of a step")
        if name in OF_SCHEDULE:
            raise ValueError(f"{name} says which rows a step has, so that a step is another one under it")
        if name in OF_SHAPES and not other_weights:
            raise ValueError(
                f"{name} gives the weights other shapes than those that the run had before the step; it may differ "
                "with other weights only (--model, other_model)"
            )
    changed = GRPOConfig.from_mapping({**vars(args), **changes})
    return {name: getattr(changed, name) for name in changes}


def changed_target(
    run: RecordedRun, step: int, stage: Stage | None, other_rewards: bool = False, other_weights: bool = False
) -> Target:
    """Returns a step as the target of a replay under changes, with the first stage that these reach but for settings.

    Args:
        run: The recorded run.
        step: The step.
        stage: First stage to compute again at the latest; None for the first that is reached.
        other_rewards: Whether rewards differ.
        other_weights: Whether the weights that sample differ.
    """
    reached: Stage = "rollout" if other_weights else "reward" if other_rewards else "update"
    return Target(run, step, first_stage(reached, stage or reached), is_changed=True)


def first_stage(*stages: Stage) -> Stage:
    """Returns the one that comes first in a step."""
    return min(stages, key=STAGES.index)


def replay_changed(
    target: Target,
    make: Make,
    make_changed: Make,
    settings: SettingsAt,
    changes: Mapping[str, Any],
    other_weights: bool,
) -> Outcome:
    """Computes a step again under changes, from the state that the run had before it.

    Args:
        target: The step, with the first stage that the changes reach if they are more than settings.
        make: Makes the trainer of the run.
        make_changed: Makes the trainer with other rewards or weights.
        settings: Returns the settings of the run at a step.
        changes: Settings that differ.
        other_weights: Whether the weights are others, whose optimizer then starts afresh.

    Raises:
        ValueError: The step was not recorded, or a changed setting cannot be used.
    """
    target.check()
    args = settings(target.step)
    stage = first_stage(target.stage, *map(stage_of, changes))
    start = target.step - 1 if stage == "loss" else first_of_rollout(target.step, args)
    changed = replace(target, stage=stage, is_changed=True, starts_at=start if other_weights else 0)
    with tempfile.TemporaryDirectory(prefix="groupax-replay-") as folder:
        args = replace(args, **{**QUIET, **changes}, output_dir=str(Path(folder) / "changed"), resume="never")
        saved = target.run.checkpoint(start) if start else None
        if saved is not None and saved.step == start and not other_weights:
            link_checkpoint(saved, Path(folder) / "before")
            changed = replace(changed, identity=saved.state["identity"])
            args = replace(args, resume=str(Path(folder) / "before"))
        elif start and not other_weights:
            with prepared(Target(target.run, start, "update", saves=True), make, settings) as (before, own):
                identity = trained(before, make, replace(own, output_dir=str(Path(folder) / "before")))
            changed = replace(changed, identity=identity)
            args = replace(args, resume=str(Path(folder) / "before"))
        moves: list[float] = []
        has_tokens = stage in ("reward", "advantage", "loss")  # of the run
        if has_tokens:
            replay_steps(
                Target(target.run, target.step, "update"), make, settings, lambda own: observe_move(own, moves)
            )
        trainer = make_changed(changed, args)
        if has_tokens:
            observe_move(trainer, moves)
        trainer.train()
        return replace(outcome_of(changed, trainer), moves=tuple(moves))
