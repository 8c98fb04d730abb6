"""Finds the step that made a metric fulfil a condition, and what differs there today."""

import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupax.core.config import GRPOConfig
from groupax.core.settings.fields import nearest
from groupax.core.terminal.printable import printable
from groupax.satellites.replay.outcome import Outcome, comparison
from groupax.satellites.replay.recorded import RecordedRun, recorded_run
from groupax.satellites.replay.session import maker_of, replay_steps, target_of
from groupax.satellites.replay.trainer import Make

# Conditions on metrics, as texts: 'kl > 1', 'grad_norm > 10 or loss is nan'. They are parsed, never evaluated.
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_TERM = re.compile(r"\s*([\w/.@-]+?)\s*(<=|>=|==|!=|<|>)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*")
_NAN = re.compile(r"\s*([\w/.@-]+)\s+is\s+nan\s*")


@dataclass(frozen=True)
class Term:
    """A comparison of a metric with a number; without a comparison, the metric must not be finite."""

    metric: str
    comparison: str = ""
    number: float = 0.0

    def holds(self, metrics: Mapping[str, Any]) -> bool:
        """Returns whether a line of metrics fulfils it; one without the metric does not."""
        value = metrics.get(self.metric)
        if not self.comparison or value is None:
            return not self.comparison and value is None and self.metric in metrics
        return COMPARISONS[self.comparison](value, self.number)


@dataclass(frozen=True)
class Condition:
    """Terms of which all of one of the parts must hold, and the text that describes them."""

    text: str
    parts: tuple[tuple[Term, ...], ...]

    def holds(self, metrics: Mapping[str, Any]) -> bool:
        """Returns whether a line of metrics fulfils the condition."""
        return any(all(term.holds(metrics) for term in part) for part in self.parts)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(dict.fromkeys(term.metric for part in self.parts for term in part))


def parsed_condition(text: str) -> Condition:
    """Returns the condition that a text describes.

    Raises:
        ValueError: It describes none.
    """
    parts = [re.split(r"\s+and\s+", part) for part in re.split(r"\s+or\s+", text)]
    return Condition(text.strip(), tuple(tuple(_term(term, text) for term in part) for part in parts))


def _term(term: str, text: str) -> Term:
    if found := _TERM.fullmatch(term):
        try:
            return Term(found[1], found[2], float(found[3]))
        except ValueError:
            pass
    if found := _NAN.fullmatch(term):
        return Term(found[1])
    raise ValueError(
        f"{text!r} is not a condition on metrics: {term.strip()!r} must be like 'kl > 1' or 'loss is nan', and 'and' "
        "and 'or' join several"
    )


@dataclass(frozen=True, eq=False)
class Bisection:
    """The step that a metric went wrong in.

    Attributes:
        run: The run.
        condition: The condition.
        step: First step whose line of metrics fulfils the condition.
        before: Step of the line of metrics before it; 0 for none.
        outcomes: Steps up to it, computed again, up to the first that is not the recorded one.
    """

    run: RecordedRun
    condition: Condition
    step: int
    before: int
    outcomes: Sequence[Outcome]

    @property
    def parted(self) -> Outcome | None:
        """The first step that is not the recorded one; None if all are."""
        last = self.outcomes[-1]
        return None if last.is_equal else last

    def __str__(self) -> str:
        first = opening(self.condition, self.step, self.before)
        return "\n".join(map(printable, [first, *bisection_lines(self)]))


def opening(condition: Condition, step: int, before: int) -> str:
    """Returns in which step a condition holds first, as text; `before` is the step of the line before, 0 for none."""
    earlier = f"; it does not in the line of metrics before it, that of step {before}" if before else ""
    return f"{condition.text} first holds in step {step}{earlier}"


def bisection_lines(found: Bisection) -> Iterator[str]:
    """Yields the lines of a bisection after its opening: what differs from the record."""
    first = found.outcomes[0].step
    equal = [outcome.step for outcome in found.outcomes if outcome.is_equal]
    if change := found.run.changes.get(first - 1):
        listed = ", ".join(f"{name} {then!r} -> {now!r}" for name, (then, now) in change.items())
        yield f"before step {first} the run was continued with other settings: {listed}"
    if equal:
        which = f"steps {equal[0]} to {equal[-1]} are" if len(equal) > 1 else f"step {equal[0]} is"
        yield f"{which} computed as recorded, with the dataset, rewards and settings of today"
    if found.parted is not None:
        yield from comparison(found.parted)
    yield f"look at it: groupax view {shlex.quote(str(found.run.folder))}"


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


def bisected(
    run: RecordedRun, condition: Condition, make: Make, window: int, args: GRPOConfig | None = None
) -> Bisection:
    """Finds the step that made a metric of a run fulfil a condition, and computes the steps up to it again.

    Args:
        run: The recorded run.
        condition: The condition.
        make: Makes the trainer of the run.
        window: Least number of steps to compute again, but none before the run had the settings of the last of them.
        args: Settings of the run; None takes those that it had there.

    Raises:
        ValueError: No step fulfils the condition, or the run is another one.
    """
    if window < 1:
        raise ValueError(f"the window must be at least 1 step, got {window}")
    step, before = first_line(run.metrics, condition)
    first = max(1, min(before + 1, step - window + 1), min(run.records))
    first = max([first, *(change + 1 for change in run.changes if change < step)])
    outcomes = replay_steps(replace(target_of(run, step), first=first), make, args)
    number = next((number for number, outcome in enumerate(outcomes) if not outcome.is_equal), len(outcomes) - 1)
    return Bisection(run, condition, step, before, outcomes[: number + 1])


def bisect_run(
    run: str | Path, until: str, *arguments: Any, args: GRPOConfig | None = None, window: int = 8, **named: Any
) -> Bisection:
    """Finds the first step of a run whose metrics fulfil a condition, and what differs in it today.

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
    return bisected(recorded, parsed_condition(until), maker_of(arguments, named), window, args)
