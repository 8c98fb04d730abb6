"""The step that a metric went wrong in, and the texts about it and its cause."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from groupax.replay.causes import Cause
from groupax.replay.expression import Condition
from groupax.replay.outcome import Outcome, comparison
from groupax.replay.recorded import RecordedRun
from groupax.replay.shares import SHOWN_ROWS, shown_number
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
        alone: The step of the cause by itself, with the weights that it had, if it differs and an earlier one does too.
    """

    run: RecordedRun
    condition: Condition
    step: int
    before: int
    outcomes: Sequence[Outcome]
    cause: Cause | None
    why_not: str = ""
    alone: Outcome | None = None

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
    return f"{condition} first holds in step {step}{earlier}"


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
    for each in (found.parted, found.alone):
        if each is not None:
            yield from comparison(each)
    if found.cause is None:
        yield f"the rows that did it were not looked for: {found.why_not}"
    else:
        yield from cause_lines(found.cause, found.condition.metrics, str(found.condition))
    step = found.cause.step if found.cause else found.outcomes[-1].step
    if run.command(step) is None:
        yield f"look at it: groupax.replay_step({str(run.folder)!r}, {step}, ..., why=True), then groupax view"
    else:
        folder = shlex.quote(str(run.folder))
        yield f"look at it: groupax replay {folder} --step {step} --why, then groupax view {folder}"


def cause_lines(cause: Cause, names: Sequence[str], until: str) -> Iterator[str]:
    """Yields the lines of a cause.

    Args:
        cause: The cause.
        names: Metrics of the condition.
        until: The condition.
    """
    shown, step = cause.shown_at, cause.step
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
    if cause.is_sampled:
        yield "(its completions are sampled again under each of these weights, so that a part of this is chance)"
    if cause.left_out:
        groups = dict.fromkeys(shares.rollouts[index].prompt_index for index in cause.group)
        of = f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
        if cause.group and cause.group != cause.left_out:
            yield f"without the {len(cause.group)} rows of {of} {_values(cause, cause.without_group, names)}"
        yield f"without these rows of step {step} {_values(cause, cause.without, names)}:"
        for index in cause.left_out[:SHOWN_ROWS]:
            yield f"  {shares.place(index)}"
        if len(cause.left_out) > SHOWN_ROWS:
            yield f"  and {len(cause.left_out) - SHOWN_ROWS} more"
    elif cause.is_searched:
        yield f"{until} stays, or most of it, whichever half of its groups is left out: it is the update as a whole"
    elif cause.is_own:
        yield "its completions follow from the weights, so that none of its rows was left out"
    else:
        yield "no single update did it, so that none of its rows was left out; --window looks further back"
    yield from shares.lines()
    yield f"({cause.num_updates} updates were computed for this)"


def _values(cause: Cause, metrics: Any, names: Sequence[str]) -> str:
    values = ", ".join(f"{name} is {shown_number(metrics.get(name))}" for name in names)
    undone = cause.rise.undone(metrics)
    return values if undone is None else f"{values} (undoes {100 * undone:.0f} %)"
