"""A step of a recorded run, computed again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from groupax.config import GRPOConfig
from groupax.replay.outcome import Outcome, compare_step
from groupax.replay.recorded import RecordedRun
from groupax.replay.shares import Shares, shares_of
from groupax.replay.trainer import (
    Make,
    ReplayTrainer,
    SettingsAt,
    Target,
    first_of_rollout,
    prepared,
)
from groupax.runs.process import process_of
from groupax.runs.step_record import Stage


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

    Where other tokens come out of a bundle, whose rewards are known for those of the run alone, the stages after the
    rollout are computed with the run's.

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
            trainer.observe = lambda step, moment: shares.append(shares_of(trainer, step, moment))

    outcome = replay_steps(target, make, settings, prepare, weights_text)[-1]
    if target.run.is_foreign and outcome.has_other_tokens:
        of_record = replay_steps(replace(target, stage="reward"), make, settings, prepare, weights_text)[-1]
        outcome = replace(of_record, target=target, stages=(*outcome.stages[:2], *of_record.stages[2:]), is_forced=True)
    if why and not has_inputs(outcome):  # today's dataset or rewards are others than the run's
        [of_record] = replay_steps(replace(target, stage="loss"), make, settings, prepare)
        if not has_inputs(of_record):
            raise ValueError(
                f"the completions of step {target.step} were not kept, and others come out today, so that the shares "
                "of its rows are not known"
            )
    return replace(outcome, shares=shares[-1]) if why else outcome


def has_inputs(outcome: Outcome) -> bool:
    """Returns whether the update of a step had the completions, rewards and advantages of the run."""
    inputs = ("reward", "advantage") if outcome.is_forced else ("rollout", "reward", "advantage")
    return all(stage.is_equal for stage in outcome.stages if stage.stage in inputs)


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
