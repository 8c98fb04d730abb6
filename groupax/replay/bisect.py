"""Finds the step that made a metric fulfil a condition: what differs there today, and the rows that did it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from groupax.replay.bisection import Bisection
from groupax.replay.causes import Cause, NoCauseError, Search
from groupax.replay.expression import Condition
from groupax.replay.moments import Moment
from groupax.replay.outcome import Outcome
from groupax.replay.recorded import RecordedRun
from groupax.replay.session import replay_steps, replay_target, target_of
from groupax.replay.trainer import Make, ReplayTrainer, SettingsAt, Target
from groupax.runs.step_record import Stage, StepRecord
from groupax.settings.fields import nearest

OF_INPUTS = ("data", "rollout", "reward", "advantage")  # stages whose results are recorded as they were


def first_line(lines: Sequence[Mapping[str, Any]], condition: Condition) -> tuple[int, int]:
    """Returns the first step whose metrics fulfil a condition, and the step of the line of metrics before it.

    Raises:
        ValueError: No step does, or a metric does not exist.
    """
    missing = [name for name in condition.metrics if not any(name in line for line in lines)]
    if missing:
        names = {name for line in lines for name in line}
        hint = "; it is logged where beta is not 0" if missing[0] == "kl" else nearest(missing[0], sorted(names))
        raise ValueError(f"the run has no metric {missing[0]!r} in its metrics.jsonl{hint}")
    before = 0
    for line in lines:
        if condition.holds(line):
            return int(line["step"]), before
        before = int(line["step"])
    values = {name: [line[name] for line in lines if line.get(name) is not None] for name in condition.metrics}
    ranges = ", ".join(f"{name} is {min(own):.4g} to {max(own):.4g}" for name, own in values.items() if own)
    raise ValueError(f"the condition holds in no step up to {before}: {ranges}")


def bisected(run: RecordedRun, condition: Condition, make: Make, settings: SettingsAt, window: int) -> Bisection:
    """Finds the step and the rows that made a metric of a run fulfil a condition.

    The last steps up to it are computed again, as `replay_step` does. If they are the recorded ones, or if only what is
    recorded differs, such as a row of the dataset or a reward, updates are left out (see `causes`).

    Args:
        run: The recorded run.
        condition: The condition.
        make: Makes the trainer of the run.
        settings: Returns the settings of the run at a step.
        window: Least number of steps to compute again, but none before the run had the settings of the last of them.

    Raises:
        ValueError: No step fulfils the condition, or the run is another one.
    """
    if window < 1:
        raise ValueError(f"the window must be at least 1 step, got {window}")
    step, before = first_line(run.metrics, condition)
    first = max(1, min(before + 1, step - window + 1), min(run.records))
    first = max([first, *(change + 1 for change in run.changes if change < step)])
    target = replace(target_of(run, step), first=first)
    outcomes, cause, why_not = _replayed(target, make, settings, condition, before)
    number = next((number for number, outcome in enumerate(outcomes) if not outcome.is_equal), len(outcomes) - 1)
    if cause is None and not why_not:
        stage: Stage = next(each.stage for each in outcomes[number].stages if not each.is_equal)
        why_not = f"step {outcomes[number].step} computes another {stage} than it did, with the same rows"
        if stage in OF_INPUTS:
            again, cause, why_not = _replayed(replace(target, stage="loss"), make, settings, condition, before)
            if cause is None:
                why_not = why_not or _why_not(run, again)
    alone, at = None, step if cause is None else cause.step
    if not outcomes[number].is_equal and at != outcomes[number].step:
        again_alone = replay_target(target_of(run, at), make, settings)
        alone = None if again_alone.is_equal else again_alone
    return Bisection(run, condition, step, before, outcomes[: number + 1], cause, why_not, alone)


def _why_not(run: RecordedRun, again: Sequence[Outcome]) -> str:
    """Returns why recorded rows could not be trained on as they were."""
    lost = next((each.step for each in again if run.table(each.step) is None), None)
    if lost is not None:
        return f"the completions of step {lost} were not kept, so that its update cannot be repeated with their rewards"
    parted = next(each.step for each in again if not _is_close(each.record, run.records[each.step]))
    return f"step {parted} is not computed as it was from its recorded rows either"


def _is_close(now: StepRecord, then: StepRecord) -> bool:
    """Returns whether an update is the recorded one, but for the rounding of other machines and numbers of devices."""
    numbers = [np.array([each.loss_value, each.grad_norm], float) for each in (now, then)]
    rounds_alike = np.allclose(*numbers, rtol=1e-3, atol=1e-6, equal_nan=True)
    return bool(rounds_alike) and now.learning_rate == then.learning_rate


def _replayed(
    target: Target, make: Make, settings: SettingsAt, condition: Condition, before: int
) -> tuple[list[Outcome], Cause | None, str]:
    """Returns a target's steps, computed again, and if they are the recorded ones, the cause or why there is none."""
    moments: dict[int, Moment] = {}
    causes: list[Cause] = []
    faults: list[str] = []

    def use(trainer: ReplayTrainer) -> None:
        def finish() -> None:
            now, then = RecordedRun(trainer.run_folder.path), target.run.records
            # the dataset's rows and their rewards are those of the record where only updates are computed again
            if target.stage == "loss":
                are_those = all(_is_close(now.records[step], then[step]) for step in target.steps)
            else:
                are_those = all(now.records[step] == then[step] for step in target.steps)
            if not are_those:
                return
            lines = {int(line["step"]): line for line in now.metrics}
            shown = (step for step in target.steps if step > before and condition.holds(lines[step]))
            last = next(shown, target.step)
            try:
                own = {step: moment for step, moment in moments.items() if step <= last}
                line = next((line for line in target.run.metrics if line["step"] == before), {})
                causes.append(Search(trainer, condition, own, line).cause())
            except NoCauseError as error:
                faults.append(str(error))

        trainer.observe, trainer.finish = moments.__setitem__, finish

    outcomes = replay_steps(target, make, settings, use)
    return outcomes, next(iter(causes), None), next(iter(faults), "")
