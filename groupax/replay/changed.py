"""A step of a recorded run under changes, from the state that the run had before it."""

import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from groupax.config import GRPOConfig
from groupax.replay.moves import observe_move
from groupax.replay.outcome import Outcome
from groupax.replay.recorded import RecordedRun
from groupax.replay.session import outcome_of, replay_steps
from groupax.replay.trainer import Make, SettingsAt, Target, first_of_rollout, link_checkpoint, prepared, trained
from groupax.runs.step_record import STAGES, Stage
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
from groupax.settings.steps import OF_SCHEDULE, OF_SHAPES, QUIET, UNSEEN

OF_UPDATES = (
    *(ObjectiveSettings, EntropySettings, MaskSettings, ReferenceSettings, UpdateSettings),
    *(LearningRateSettings, OptimizerSettings),
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
