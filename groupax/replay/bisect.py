"""Finds the step that made a metric fulfil a condition: what differs there today, and the rows that did it."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from groupax.config import GRPOConfig
from groupax.replay.causes import Cause, Condition, NoCauseError, Search, parsed_condition
from groupax.replay.outcome import SHOWN_ROWS, Outcome, comparison, shown_number
from groupax.replay.recorded import RecordedRun, recorded_run
from groupax.replay.session import arguments_by_name, maker_of, replay_steps, settings_of, target_of
from groupax.replay.trainer import Make, Moment, ReplayTrainer, SettingsAt, Target
from groupax.runs.step_record import Stage, StepRecord
from groupax.settings.fields import nearest
from groupax.terminal.printable import printable

FACTS = ("learning_rate", "grad_norm", "loss")


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

    @property
    def has_calls(self) -> bool:
        """True if tools or environments answered in these steps."""
        return any(self.run.calls(self.run.records[each.step].num_rollouts - 1) for each in self.outcomes)

    def __str__(self) -> str:
        first = opening(self.condition, self.step, self.before)
        return "\n".join(map(printable, [first, *bisection_lines(self)]))


def opening(condition: Condition, step: int, before: int) -> str:
    """Returns in which step a condition holds first, as text.

    Args:
        condition: The condition.
        step: First step whose line of metrics fulfils it.
        before: Step of the line before it; 0 for none.
    """
    earlier = f"; it does not in the line of metrics before it, that of step {before}" if before else ""
    return f"{condition.text} first holds in step {step}{earlier}"


def bisection_lines(found: Bisection) -> Iterator[str]:
    """Yields the lines of a bisection after its opening: what differs from the record, and the cause."""
    run = found.run
    equal = [outcome.step for outcome in found.outcomes if outcome.is_equal]
    first = found.outcomes[0].step
    if change := run.changes.get(first - 1):
        listed = ", ".join(f"{name} {then!r} -> {now!r}" for name, (then, now) in change.items())
        yield f"before step {first} the run was continued with other settings: {listed}"
    if equal:
        which = f"steps {equal[0]} to {equal[-1]} are" if len(equal) > 1 else f"step {equal[0]} is"
        tools = ", and with tools' answers from the record" if found.has_calls else ""
        yield f"{which} computed as recorded, with the dataset, rewards and settings of today{tools}"
    if found.parted is not None:
        yield from comparison(found.parted)
    if found.cause is None:
        yield f"the rows that did it were not looked for: {found.why_not}"
    else:
        yield from cause_lines(found.cause, found.condition)
    step = found.cause.step if found.cause else found.outcomes[-1].step
    if run.command(step) is None:
        yield f"look at it: groupax.replay_step({str(run.folder)!r}, {step}, ..., why=True), then groupax view"
    else:
        folder = shlex.quote(str(run.folder))
        yield f"look at it: groupax replay {folder} --step {step} --why, then groupax view {folder}"


def cause_lines(cause: Cause, condition: Condition) -> Iterator[str]:
    """Yields the lines of a cause."""
    shown, step, names = cause.shown_at, cause.step, condition.metrics
    yield f"step {shown} under the weights before each step:"
    yield f"  {'step':>6}" + "".join(f"{name:>24}" for name in names)
    for number, metrics in sorted(cause.under.items()):
        yield f"  {number:6}" + "".join(f"{shown_number(metrics.get(name)):>24}" for name in names)
    shares, metric = cause.shares, cause.rise.metric
    facts = ", ".join(f"{name} {shown_number(cause.metrics.get(name))}" for name in FACTS)
    if cause.is_own:
        low = cause.rise.low
        over = "" if low is None else f" over the {shown_number(low)} of the line before"
        yield f"most of its {metric}{over} is there under the oldest of these weights: its own rows do it ({facts})"
    elif cause.is_drift:
        yield f"{metric} changes from update to update; the largest part of it is that of step {step} ({facts})"
    else:
        yield f"the update of step {step} did it ({facts})"
    if cause.left_out:
        values = ", ".join(f"{name} is {shown_number(cause.without.get(name))}" for name in names)
        undone = cause.rise.undone(cause.without)
        values += "" if undone is None else f" (undoes {100 * undone:.0f} %)"
        yield f"without these rows of step {step} {values}:"
        for index in cause.left_out[:SHOWN_ROWS]:
            yield f"  {shares.place(index)}"
        if len(cause.left_out) > SHOWN_ROWS:
            yield f"  and {len(cause.left_out) - SHOWN_ROWS} more"
    elif cause.is_searched:
        yield f"{condition.text} stays, or most of it, without either half of its groups: it is the update as a whole"
    else:
        yield "no single update did it, so that none of its rows was left out; --window looks further back"
    yield from shares.lines()
    yield f"({cause.num_updates} updates were computed for this)"


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
    return Bisection(run, condition, step, before, outcomes[: number + 1], cause, why_not)


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


def bisect_run(
    run: str | Path, until: str, *arguments: Any, args: GRPOConfig | None = None, window: int = 8, **named: Any
) -> Bisection:
    """Finds the first step of a run whose metrics fulfil a condition, and the update and the rows that made it so.

    Args:
        run: The run folder, which is not changed.
        until: The condition, such as "kl > 1" or "grad_norm > 10 or loss is nan".
        arguments: Model and reward functions, as the run's `GRPOTrainer` had them.
        args: Settings of the run; None takes those in its folder, and shows no progress.
        window: Number of steps to compute again, of which the last one is the first that fulfils the condition.
        named: Further arguments of the run's `GRPOTrainer`, such as `train_dataset`.

    Returns:
        What was found, which prints as text.

    Raises:
        ValueError: No step fulfils the condition, or the run is another one.

    Example:
        >>> print(bisect_run("runs/one", "kl > 1", model, reward, train_dataset=prompts))  # doctest: +SKIP
    """
    recorded = recorded_run(run)
    make = maker_of(arguments_by_name(arguments, named))
    return bisected(recorded, parsed_condition(until), make, settings_of(recorded, args), window)
