"""A step of a recorded run, computed again as it was or under changes."""

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from groupax.core.config import GRPOConfig
from groupax.core.settings.compute import UpdateSettings
from groupax.core.settings.fields import nearest
from groupax.core.settings.objective import (
    AdvantageSettings,
    EntropySettings,
    MaskSettings,
    ObjectiveSettings,
    ReferenceSettings,
)
from groupax.core.settings.optimizer import LearningRateSettings, OptimizerSettings
from groupax.core.settings.rollouts import PromptSettings
from groupax.core.settings.run import OF_SCHEDULE, OF_SHAPES, QUIET, UNSEEN
from groupax.core.settings.sampling import RolloutSamplingSettings
from groupax.core.types import Row
from groupax.runs.header import process_of
from groupax.runs.step_record import STAGES, Stage
from groupax.satellites.replay.outcome import Outcome, Shares, compare_step, shares_of
from groupax.satellites.replay.recorded import RecordedRun, recorded_run
from groupax.satellites.replay.trainer import (
    Make,
    Moment,
    ReplayTrainer,
    SettingsAt,
    Target,
    first_of_rollout,
    link_checkpoint,
    prepared,
    trained,
)


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
    why: bool = False,
) -> Outcome:
    """Computes a step again and compares it with its record.

    Args:
        target: The step.
        make: Makes the trainer of the run.
        settings: Returns the settings of the run at a step.
        why: Whether to compute the shares of its rows in the gradient.

    Raises:
        ValueError: The step was not recorded, or the run is another one.
    """
    shares: list[Shares] = []

    def prepare(trainer: ReplayTrainer) -> None:
        if why:
            trainer.observe = lambda step, moment: shares.append(shares_of(trainer, step, moment))

    outcome = replay_steps(target, make, settings, prepare)[-1]
    if why and not has_inputs(outcome):  # today's dataset or rewards are others than the run's
        [of_record] = replay_steps(replace(target, stage="loss"), make, settings, prepare)
        if not has_inputs(of_record):
            raise ValueError(
                f"the completions of step {target.step} were not kept, and others come out today, so that there are no "
                "rows whose shares could be computed"
            )
    return replace(outcome, shares=shares[-1]) if why else outcome


def has_inputs(outcome: Outcome) -> bool:
    """Returns whether the update of a step had the completions, rewards and advantages of the run."""
    return all(stage.is_equal for stage in outcome.stages if stage.stage in ("rollout", "reward", "advantage"))


def replay_steps(
    target: Target,
    make: Make,
    settings: SettingsAt,
    use: Callable[[ReplayTrainer], Any],
) -> list[Outcome]:
    """Computes the steps of a target again, and returns an outcome of each; `use` receives the trainer before."""
    target.check()
    with prepared(target, make, settings) as (ready, args):
        trainer = make(ready, args)
        use(trainer)
        trainer.train()
        return [outcome_of(replace(target, step=step, first=target.steps[0]), trainer) for step in target.steps]


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


def observe_move(trainer: ReplayTrainer, found: list[float]) -> None:
    """Has a trainer measure the KL between the policies before and after the update of its target, into a list.

    It is the mean of exp(d) - 1 - d over the tokens that the step trains on, d being the change of a token's log-prob.
    """
    rows: list[Row] = []
    before: list[np.ndarray] = []

    def begin(step: int, moment: Moment) -> None:
        del step
        rows[:] = moment.rows
        before[:] = _logps(trainer, rows)

    def end() -> None:
        changes = [b - a for a, b in zip(before, _logps(trainer, rows), strict=True)]
        sampled = np.concatenate([change[row.mask] for change, row in zip(changes, rows, strict=True)])
        found.append(float(np.mean(np.expm1(sampled) - sampled)) if sampled.size else 0.0)

    trainer.observe, trainer.finish = begin, end


def _logps(trainer: ReplayTrainer, rows: Sequence[Row]) -> list[np.ndarray]:
    learner = trainer.learner
    return [each.astype(np.float64) for each in learner.logprobs(learner.policy, rows)[0]]


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


def changed_settings(changes: Mapping[str, Any], args: GRPOConfig) -> Mapping[str, Any]:
    """Returns settings that differ from those of the run, as values of their types.

    Raises:
        ValueError: One is not a setting, has a value of another type, or cannot differ in a step.
    """
    known = [each.name for each in fields(GRPOConfig)]
    for name in changes:
        if name not in known:
            raise ValueError(f"{name!r} is not a setting of groupax train{nearest(name, known)}")
        if name in UNSEEN:
            raise ValueError(f"{name} has no effect on a replay")
        if name in OF_SCHEDULE:
            raise ValueError(f"{name} says which rows a step has, so that a step is another one under it")
        if name in OF_SHAPES:
            raise ValueError(f"{name} gives the weights other shapes than those that the run had before the step")
    changed = GRPOConfig.from_mapping({**vars(args), **changes})
    return {name: getattr(changed, name) for name in changes}


def changed_target(
    run: RecordedRun,
    step: int,
    stage: Stage | None,
    changes: Collection[str],
    other_rewards: bool = False,
) -> Target:
    """Returns a step as the target of a replay under changes, with the first stage that these reach.

    Args:
        run: The recorded run.
        step: The step.
        stage: First stage to compute again at the latest; None for the first that is reached.
        changes: Names of the settings that differ.
        other_rewards: Whether rewards differ.
    """
    of_parts: Stage = "reward" if other_rewards else "update"
    reached: tuple[Stage, ...] = (stage or of_parts, of_parts, *map(stage_of, changes))
    return Target(run, step, STAGES[min(map(STAGES.index, reached))], is_changed=True)


def replay_changed(
    target: Target,
    make: Make,
    make_changed: Make,
    settings: SettingsAt,
    changes: Mapping[str, Any],
) -> Outcome:
    """Computes a step again under changes, from the state that the run had before it.

    Args:
        target: The step, with the first stage that the changes reach (see `changed_target`).
        make: Makes the trainer of the run.
        make_changed: Makes the trainer with other rewards.
        settings: Returns the settings of the run at a step.
        changes: Settings that differ.

    Raises:
        ValueError: The step was not recorded, or a changed setting cannot be used.
    """
    target.check()
    args = replace(settings(target.step), **QUIET, resume="never")
    start = target.step - 1 if target.stage == "loss" else first_of_rollout(target.step, args)
    with tempfile.TemporaryDirectory(prefix="groupax-replay-") as folder:
        place = Path(folder) / "before"
        if start:
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


def replay_step(
    run: str | Path,
    step: int,
    *arguments: Any,
    args: GRPOConfig | None = None,
    stage: Stage | None = None,
    why: bool = False,
    changes: Mapping[str, Any] | None = None,
    other_rewards: Any = None,
    **named: Any,
) -> Outcome:
    """Computes a step of a run again, and compares it with its record, or under changes with what it was.

    Args:
        run: The run folder, which is not changed, but for its `why/`.
        step: The optimizer step.
        arguments: Model and reward functions, as the run's `GRPOTrainer` had them.
        args: Settings of the run; None takes those in its folder, and shows no progress.
        stage: First stage to compute again; those before it are taken from the record. None for all that this machine
            computes, or under changes for the first that these reach.
        why: Whether to compute the shares of rows in the gradient, and to keep them for `groupax view`.
        changes: Settings that differ, by name.
        other_rewards: Reward functions that score the recorded completions instead of the run's.
        named: Further arguments of the run's `GRPOTrainer`, such as `train_dataset`.

    Returns:
        The outcome, which prints as what differs.

    Raises:
        ValueError: The step was not recorded, the run is another one, or a setting cannot be used.

    Example:
        >>> outcome = replay_step("runs/one", 812, model, reward, train_dataset=prompts)  # doctest: +SKIP
        >>> print(outcome, outcome.is_equal)  # doctest: +SKIP
        >>> changed = replay_step("runs/one", 812, model, reward, changes={"beta": 0.1})  # doctest: +SKIP
    """
    recorded = recorded_run(run)
    settings, given = settings_of(recorded, args), arguments_by_name(arguments, named)
    if changes is None and other_rewards is None:
        outcome = replay_target(target_of(recorded, step, stage), maker_of(given), settings, why=why)
        if outcome.shares is not None:
            outcome.shares.write(recorded.folder)
        return outcome
    if why:
        raise ValueError("why=True is about the step as it was; leave out changes and other_rewards")
    make = maker_of(given if other_rewards is None else {**given, "reward_funcs": other_rewards})
    changed = changed_settings(changes or {}, settings(step))
    target = changed_target(recorded, step, stage, changed, other_rewards is not None)
    return replay_changed(target, maker_of(given), make, settings, changed)


def arguments_by_name(arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a `GRPOTrainer`; the first two may be given by position."""
    if len(arguments) > 2:
        raise TypeError(f"model and reward functions may be given by position, got {len(arguments)} positions")
    return {**dict(zip(("model", "reward_funcs"), arguments, strict=False)), **named}


def maker_of(given: Mapping[str, Any]) -> Make:
    """Returns what makes a trainer with these arguments."""

    def make(target: Target, args: GRPOConfig) -> ReplayTrainer:
        return ReplayTrainer(target, args=args, **given)

    return make
