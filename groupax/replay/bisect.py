"""Finds the step that made a metric fulfil a condition: what differs there today, and the rows that did it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupax.replay.causes import Cause, NoCauseError, Search
from groupax.replay.expression import Condition
from groupax.replay.moments import Moment
from groupax.replay.recorded import RecordedRun
from groupax.replay.session import Outcome, replay_steps
from groupax.replay.trainer import Make, ReplayTrainer, SettingsAt, Target
from groupax.runs.step_record import Stage, StepRecord
from groupax.settings.fields import nearest
from groupax.terminal.printable import printable

OF_INPUTS = ("data", "rollout", "reward", "advantage")  # stages whose results are recorded as they were


@dataclass(frozen=True, eq=False)
class Bisection:
    """The step that a metric went wrong in.

    Attributes:
        run: The run.
        condition: The condition.
        step: First step whose line of metrics fulfils the condition.
        before: Step of the line of metrics before it.
        outcomes: Steps up to it, computed again, up to the first that is not the recorded one.
        cause: The update and the rows that did it; None if they could not be found.
        why_not: Why not.
    """

    run: RecordedRun
    condition: Condition
    step: int
    before: int
    outcomes: Sequence[Outcome]
    cause: Cause | None
    why_not: str = ""

    @property
    def parted(self) -> Outcome | None:
        """The first step that is not the recorded one; None if all are."""
        last = self.outcomes[-1]
        return None if last.is_equal else last

    def __str__(self) -> str:
        from groupax.replay.show_cause import bisection_lines

        return "\n".join(map(printable, bisection_lines(self)))


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
    raise ValueError(f"the condition holds in no step up to {before}")


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
    outcomes, cause, why_not = _replayed(Target(run, step, "data", first), make, settings, condition, before)
    number = next((number for number, outcome in enumerate(outcomes) if not outcome.is_equal), len(outcomes) - 1)
    if cause is None and not why_not:
        stage: Stage = next(each.stage for each in outcomes[number].stages if not each.is_equal)
        why_not = f"step {outcomes[number].step} computes another {stage} than it did, with the same rows"
        if stage in OF_INPUTS:
            again, cause, why_not = _replayed(Target(run, step, "loss", first), make, settings, condition, before)
            if cause is None and not why_not:
                differing = (each for each in again if _updated(each.record) != _updated(run.records[each.step]))
                parted = next(differing).step
                why_not = f"step {parted} is not computed as it was from its recorded rows either"
    return Bisection(run, condition, step, before, outcomes[: number + 1], cause, why_not)


def _updated(record: StepRecord) -> tuple[Any, ...]:
    return record.loss, record.loss_value, record.grad_norm, record.update


def _whole(record: StepRecord) -> StepRecord:
    return record


def _replayed(
    target: Target, make: Make, settings: SettingsAt, condition: Condition, before: int
) -> tuple[list[Outcome], Cause | None, str]:
    """Returns a target's steps, computed again, and if they are the recorded ones, the cause or why there is none."""
    moments: dict[int, Moment] = {}
    causes: list[Cause] = []
    faults: list[str] = []

    def use(trainer: ReplayTrainer) -> None:
        def finish() -> None:
            now = RecordedRun(trainer.run_folder.path)
            # the dataset's rows and their rewards are those of the record where only updates are computed again
            compared = _updated if target.stage == "loss" else _whole
            if any(compared(now.records[step]) != compared(target.run.records[step]) for step in target.steps):
                return
            lines = {int(line["step"]): line for line in now.metrics}
            shown = (step for step in target.steps if step > before and condition.holds(lines[step]))
            last = next(shown, target.step)
            try:
                own = {step: moment for step, moment in moments.items() if step <= last}
                causes.append(Search(trainer, condition, own).cause())
            except NoCauseError as error:
                faults.append(str(error))

        trainer.observe, trainer.finish = moments.__setitem__, finish

    outcomes = replay_steps(target, make, settings, use)
    return outcomes, next(iter(causes), None), next(iter(faults), "")
