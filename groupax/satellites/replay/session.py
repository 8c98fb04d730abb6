"""A step of a recorded run, computed again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupax.core.config import GRPOConfig
from groupax.runs.header import process_of
from groupax.runs.step_record import Stage
from groupax.satellites.replay.outcome import Outcome, compare_step
from groupax.satellites.replay.recorded import RecordedRun, recorded_run
from groupax.satellites.replay.trainer import (
    Make,
    ReplayTrainer,
    Target,
    first_of_rollout,
    prepared,
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


def replay_steps(target: Target, make: Make, args: GRPOConfig | None = None) -> list[Outcome]:
    """Computes the steps of a target again, and returns the comparison of each with its record.

    Args:
        target: The steps.
        make: Makes the trainer of the run.
        args: Settings of the run; None takes those that it had there, without a display.

    Raises:
        ValueError: The last step was not recorded, or the run is another one.
    """
    target.check()
    own = args or replace(GRPOConfig.from_mapping(target.run.settings(target.step)), progress_bar="none")
    with prepared(target, own) as fitted:
        trainer = make(target, fitted)
        trainer.train()
        return [outcome_of(replace(target, step=step, first=target.steps[0]), trainer) for step in target.steps]


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
        columns,
        next(line for line in now.metrics if line["step"] == step),
        tuple(stages),
        next(parted, None),
        tuple(number for number in trainer.collector.sampled if number not in trainer.collector.targets),
        tuple(target.run.machine_changes(step, process_of(trainer.learner.mesh))),
    )


def replay_step(
    run: str | Path,
    step: int,
    *arguments: Any,
    args: GRPOConfig | None = None,
    stage: Stage | None = None,
    **named: Any,
) -> Outcome:
    """Computes a step of a run again, and compares it with its record.

    Args:
        run: The run folder, which is not changed.
        step: The optimizer step.
        arguments: Model and reward functions, as the run's `GRPOTrainer` had them.
        args: Settings of the run; None takes those in its folder, and shows no progress.
        stage: First stage to compute again; those before it are taken from the record. None for all that this machine
            computes.
        named: Further arguments of the run's `GRPOTrainer`, such as `train_dataset`.

    Returns:
        The outcome, which prints as what differs.

    Raises:
        ValueError: The step was not recorded, or the run is another one.

    Example:
        >>> outcome = replay_step("runs/one", 812, model, reward, train_dataset=prompts)  # doctest: +SKIP
        >>> print(outcome, outcome.is_equal)  # doctest: +SKIP
    """
    recorded = recorded_run(run)
    return replay_steps(target_of(recorded, step, stage), maker_of(arguments, named), args)[-1]


def maker_of(arguments: Sequence[Any], named: Mapping[str, Any]) -> Make:
    """Returns what makes a trainer with arguments of `GRPOTrainer`, of which the first two may be given by position."""
    if len(arguments) > 2:
        raise TypeError(f"model and reward functions may be given by position, got {len(arguments)} positions")
    given = {**dict(zip(("model", "reward_funcs"), arguments, strict=False)), **named}

    def make(target: Target, args: GRPOConfig) -> ReplayTrainer:
        return ReplayTrainer(target, args=args, **given)

    return make
