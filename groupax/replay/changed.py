"""A step of a recorded run under changes, from the state that the run had before it."""

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from groupax.config import GRPOConfig
from groupax.replay.moves import observe_move
from groupax.replay.outcome import Outcome
from groupax.replay.recorded import RecordedRun
from groupax.replay.session import outcome_of
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
from groupax.settings.rollouts import PromptSettings
from groupax.settings.run import OF_SCHEDULE, OF_SHAPES, QUIET, UNSEEN
from groupax.settings.sampling import RolloutSamplingSettings

OF_ROLLOUTS = (RolloutSamplingSettings, PromptSettings)
OF_ADVANTAGES = (AdvantageSettings,)
OF_UPDATES = (
    *(ObjectiveSettings, EntropySettings, MaskSettings, ReferenceSettings, UpdateSettings),
    *(LearningRateSettings, OptimizerSettings),
)


def stage_of(changed: str) -> Stage:
    """Returns the first stage that a setting changes."""
    stages: dict[Stage, Sequence[type]] = {"rollout": OF_ROLLOUTS, "loss": OF_UPDATES, "advantage": OF_ADVANTAGES}
    for stage, parts in stages.items():
        if any(changed == each.name for part in parts for each in fields(part)):
            return stage
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
            raise ValueError(f"{name} has no effect on a replay")
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
    run: RecordedRun,
    step: int,
    stage: Stage | None,
    changes: Collection[str],
    other_rewards: bool = False,
    other_weights: bool = False,
) -> Target:
    """Returns a step as the target of a replay under changes, with the first stage that these reach.

    Args:
        run: The recorded run.
        step: The step.
        stage: First stage to compute again at the latest; None for the first that is reached.
        changes: Names of the settings that differ.
        other_rewards: Whether rewards differ.
        other_weights: Whether the weights that sample differ.
    """
    of_parts: Stage = "rollout" if other_weights else "reward" if other_rewards else "update"
    reached: tuple[Stage, ...] = (stage or of_parts, of_parts, *map(stage_of, changes))
    return Target(run, step, STAGES[min(map(STAGES.index, reached))], is_changed=True)


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
        target: The step, with the first stage that the changes reach (see `changed_target`).
        make: Makes the trainer of the run.
        make_changed: Makes the trainer with other rewards or weights.
        settings: Returns the settings of the run at a step.
        changes: Settings that differ.
        other_weights: Whether the weights are others, whose optimizer then starts afresh.

    Raises:
        ValueError: The step was not recorded, or a changed setting cannot be used.
    """
    target.check()
    args = replace(settings(target.step), **QUIET, resume="never")
    start = target.step - 1 if target.stage == "loss" else first_of_rollout(target.step, args)
    with tempfile.TemporaryDirectory(prefix="groupax-replay-") as folder:
        place = Path(folder) / "before"
        if other_weights:
            target = replace(target, starts_at=start)
        elif start:
            saved = target.run.checkpoint(start)
            if saved is not None and saved.step == start:
                link_checkpoint(saved, place)
                identity = saved.state["identity"]
            else:
                with prepared(Target(target.run, start, "update", saves=True), make, settings) as (before, own):
                    identity = trained(before, make, replace(own, output_dir=str(place)))
            target, args = replace(target, identity=identity), replace(args, resume=str(place))
        moves: list[float] = []
        if target.stage in ("reward", "advantage", "loss"):  # on the tokens of the run
            as_it_was = replace(target, stage="update", is_changed=False)
            own_trainer = make(as_it_was, replace(args, output_dir=str(Path(folder) / "as_it_was")))
            observe_move(own_trainer, moves)
            own_trainer.train()
        trainer = make_changed(target, replace(args, **changes, output_dir=str(Path(folder) / "changed")))
        if moves:
            observe_move(trainer, moves)
        trainer.train()
        return replace(outcome_of(target, trainer), moves=tuple(moves))
