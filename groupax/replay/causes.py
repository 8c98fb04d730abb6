"""The update and the rows that made a metric go wrong, by leaving them out.

    the completions of step N, under the weights before each step of a window:   kl  0.01  0.01  0.02  1.3
                                                                the largest rise, an update's ──────▲
    that update again without half of its groups, without half of these, ...; then rows:   kl 0.02 without row 9

The metrics are those of updates, on rows that stay the same, so that what changes is what the weights do to them. Where
the metric is far from that of the line before under all weights, rows of step N are left out of step N itself.

What is left out counts as a cause only if at least half of the rise is undone without it, not by any crossing of the
condition's threshold: the rise of an update is from the weights before it to step N, that of step N's own rows from the
line of metrics before. Completions are left out as if they had never been: the others of their group have the
advantages that they would have without them.
"""

import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from groupax.metrics.completions import json_numbers
from groupax.replay.outcome import Shares, shares_of
from groupax.replay.trainer import Moment, ReplayTrainer, moment_of, return_to
from groupax.types import Row

MOST, MUCH = 0.5, 0.25  # parts of a rise: that a cause has, and that an update has whose rows are looked for
FIXED = ("learning_rate", "epoch", "step")  # metrics that depend on no weights
Numbers = Mapping[str, float | None]  # metrics; None for one that is not finite


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

    def deciding(self, metrics: Mapping[str, Any], before: Mapping[str, Any]) -> str:
        """Returns the metric by which a line fulfils the condition, and the line before it, if any, does not."""
        part = next(part for part in self.parts if all(term.holds(metrics) for term in part))
        return next((term.metric for term in part if not term.holds(before)), part[0].metric)

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
        f"{text!r} is no condition on metrics: {term.strip()!r} must be like 'kl > 1' or 'loss is nan', and 'and' and "
        "'or' join several"
    )


@dataclass(frozen=True)
class Rise:
    """The change of a metric that a cause explains; where the metric falls, low is above high.

    Attributes:
        metric: Its name.
        low: Its value before; None if that is not known.
        high: Its value after.
    """

    metric: str
    low: float | None
    high: float | None

    def undone(self, numbers: Numbers) -> float | None:
        """Returns the part that is undone where metrics have these numbers; None if it is no number."""
        return ratio((numbers.get(self.metric), self.high), (self.low, self.high))


@dataclass(frozen=True, eq=False)
class Cause:
    """The cause for which a metric fulfils a condition.

    Attributes:
        step: The step whose rows did it.
        shown_at: The step that fulfils the condition.
        rise: The rise of the metric that decides.
        under: The metrics of that step under the weights before each step, by the step.
        is_drift: Whether less than half of the rise under these weights is that of the update of `step`.
        is_searched: Whether rows were left out.
        left_out: Indices of the fewest completions that were found without which the condition does not hold.
        without: Numbers without these.
        metrics: Numbers of the update of `step`.
        shares: Shares of the completions of `step` in its gradient.
        num_updates: Updates that were computed to find it.
    """

    step: int
    shown_at: int
    rise: Rise
    under: Mapping[int, Numbers]
    is_drift: bool
    is_searched: bool
    left_out: tuple[int, ...]
    without: Numbers
    metrics: Numbers
    shares: Shares
    num_updates: int

    @property
    def is_own(self) -> bool:
        """True if it is that step's own rows."""
        return self.step == self.shown_at


class NoCauseError(ValueError):
    """The metrics of a condition do not follow from an update of the weights."""


@dataclass(eq=False)
class Search:
    """A search for the cause. The trainer must be in its loop, and ends in another state than it had.

    Attributes:
        trainer: The replay.
        condition: What the metrics of the last moment fulfil.
        moments: Moments before the updates of consecutive steps, by the step.
        line_before: The line of metrics before; empty if there is none.
        num_updates: Updates that were computed.
    """

    trainer: ReplayTrainer
    condition: Condition
    moments: Mapping[int, Moment]
    line_before: Mapping[str, Any] = field(default_factory=dict)
    num_updates: int = 0
    _drops: bool = field(default=False, init=False)  # rows that are left out, which have a gradient that is not finite

    def cause(self) -> Cause:
        """Returns the cause.

        Raises:
            NoCauseError: A metric of the condition is none of updates, or a single step does not fulfil it.
        """
        last = max(self.moments)
        under = {step: self._measured(moment, last) for step, moment in self.moments.items()}
        others = [name for name in self.condition.metrics if name in FIXED or name not in under[last]]
        if others:
            raise NoCauseError(f"{others[0]} follows from the settings or the completions, not from an update")
        if not self.condition.holds(under[last]):
            raise NoCauseError("no single step fulfils it, only their mean, which metrics.jsonl has (logging_steps)")
        metric = self.condition.deciding(under[last], self.line_before)
        values = {step: numbers.get(metric) for step, numbers in under.items()}
        holds = {step: self.condition.holds(numbers) for step, numbers in under.items()}
        before = self.line_before.get(metric)
        step, its_part = to_blame(values, holds, before)
        rise = Rise(metric, before if step == last else values[step], values[last])
        moment = self.moments[step]
        return_to(self.trainer.learner, moment)
        shares = shares_of(self.trainer, step, moment)
        self._drops = bool(np.isnan(shares.influence.norms).any())
        is_searched = its_part is None or its_part >= MUCH  # a small part of a rise is no single row's
        left_out, without = self._narrowed(step, last, shares, rise) if is_searched else ((), {})
        metrics = self._updated(moment, moment.rows)
        return Cause(
            step=step,
            shown_at=last,
            rise=rise,
            under=under,
            is_drift=its_part is not None and its_part < MOST,
            is_searched=is_searched,
            left_out=left_out,
            without=without,
            metrics=metrics,
            shares=shares,
            num_updates=self.num_updates,
        )

    def _measured(self, moment: Moment, last: int, left_out: Sequence[int] = ()) -> Numbers:
        """Returns the metrics of the last step under the weights of a moment, without some of its rows."""
        shown = self.moments[last]
        return self._updated(replace_state(shown, moment), self._without(shown, left_out))

    def _updated(self, moment: Moment, rows: Sequence[Row]) -> Numbers:
        """Returns the metrics of an update at a moment."""
        return_to(self.trainer.learner, moment)
        self.num_updates += 1
        return json_numbers(self.trainer.learner.update(rows).metrics)

    def _after(self, step: int, last: int, left_out: Sequence[int]) -> Numbers:
        """Returns the metrics of the last step, if rows of an earlier one had been left out."""
        if step == last:
            return self._measured(self.moments[last], last, left_out)
        learner = self.trainer.learner
        return_to(learner, self.moments[step])
        for number in range(step, last):
            rows = self._without(self.moments[number], left_out if number == step else ())
            if any(row.mask.any() for row in rows):
                self.num_updates += 1
                learner.update(rows)
        shown = self.moments[last]
        return self._measured(moment_of(learner, shown.experience, shown.cursor), last)

    def _without(self, moment: Moment, left_out: Sequence[int]) -> list[Row]:
        """Returns the rows of a moment as if some completions had never been, nor been compared with the others.

        They have the shapes of before, whose programs are compiled.
        """
        rows, parts = [*moment.rows], moment.parts()
        if not left_out:
            return rows
        shifts = self.trainer.collector.shifts(moment.experience, {*left_out})
        for completion, own in parts.items():
            for index in own if shifts[completion] else ():
                row = rows[index]
                moved = row.advantages + np.where(row.mask, np.float32(shifts[completion]), np.float32(0.0))
                rows[index] = replace(row, advantages=moved)
        gone = {index for completion in left_out for index in parts[completion]}
        if self._drops:
            return [row for index, row in enumerate(rows) if index not in gone]
        hidden = {index: replace(rows[index], mask=np.zeros_like(rows[index].mask), is_failure=True) for index in gone}
        return [hidden.get(index, row) for index, row in enumerate(rows)]

    def _narrowed(self, step: int, last: int, shares: Shares, rise: Rise) -> tuple[tuple[int, ...], Numbers]:
        """Returns the fewest completions without which the metrics are right, by groups and then within one."""
        found: tuple[tuple[int, ...], Numbers] = (), {}
        order = dict(zip(shares.completions, shares.influence.shares, strict=True))

        def cures(completions: Sequence[int]) -> bool:
            nonlocal found
            metrics = self._after(step, last, completions)
            undone = rise.undone(metrics)
            if self.condition.holds(metrics) or (undone is not None and undone < MOST):
                return False
            found = tuple(completions), metrics
            return True

        groups: dict[int, list[int]] = {}
        for each in shares.completions:
            groups.setdefault(shares.rollouts[each].prompt_index, []).append(each)
        by_share = sorted(groups.values(), key=lambda own: _order(sum(order[each] for each in own)))
        halves = halved(by_share, lambda own: cures([each for members in own for each in members]))
        if len(halves) == 1:
            halved(sorted(halves[0], key=lambda each: _order(order[each])), cures)
        return found


def to_blame(
    values: Mapping[int, float | None], holds: Mapping[int, bool], before: float | None
) -> tuple[int, float | None]:
    """Returns the step whose update, or whose own rows if it is the last, made a metric go wrong.

    Args:
        values: The metric of the last step's rows under the weights before each step, by the step; None if not finite.
        holds: Whether the condition holds there.
        before: The metric in the line of metrics before.

    Returns:
        The step, and the part of its update in the change of the metric under these weights; None if it is the last
        step, or a part is no number.
    """
    steps = sorted(values)
    last = steps[-1]
    whole = values[steps[0]], values[last]
    of_weights = ratio(whole, (before, values[last]))
    if all(holds.values()) if of_weights is None else of_weights < MOST:
        return last, None
    parts = {step: ratio((values[step], values[after]), whole) for step, after in itertools.pairwise(steps)}
    known = {step: each for step, each in parts.items() if each is not None}
    if len(known) < len(parts):
        right = [step for step in steps if not holds[step]]
        return (max(right) if right else last), None
    step = max(known, key=lambda each: known[each])
    return step, known[step]


def ratio(change: tuple[float | None, float | None], whole: tuple[float | None, float | None]) -> float | None:
    """Returns a change, from a value to another, as a part of a whole one; None if one of them is no number."""
    if any(value is None or not np.isfinite(value) for value in (*change, *whole)) or whole[0] == whole[1]:
        return None
    (a, b), (c, d) = np.asarray([change, whole], float)
    return float((b - a) / (d - c))


def halved(parts: Sequence[Any], cures: Callable[[Sequence[Any]], bool]) -> Sequence[Any]:
    """Returns the fewest parts that halving finds whose omission cures, all of them if no half does.

    Args:
        parts: Parts in the order in which they are suspected.
        cures: Whether leaving some of them out does it.
    """
    while len(parts) > 1:
        middle = (len(parts) + 1) // 2
        half = next((half for half in (parts[:middle], parts[middle:]) if cures(half)), None)
        if half is None:
            break
        parts = half
    return parts


def replace_state(moment: Moment, by: Moment) -> Moment:
    """Returns a moment with the weights of another one."""
    return replace(moment, state=by.state, reference=by.reference, progress=by.progress)


def _order(share: float) -> float:
    return -np.inf if np.isnan(share) else -share
