"""The update and the rows that made a metric go wrong, by leaving them out.

    the completions of step N, under the weights before each step of a window:   kl  0.01  0.01  0.02  1.3
                                                                     the update between them ──────▲
    that update again without half of its groups, without half of these, ...; then rows:   kl 0.02 without row 9

The metrics are those of updates, on rows that stay the same, so that what changes is what the weights do to them. A
metric of the completions themselves, such as their reward, needs completions of other weights: they are sampled again.
Where the metric is as wrong under all weights, the rows of step N are left out of step N itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from groupax.metrics.completions import json_numbers
from groupax.replay.expression import Condition
from groupax.replay.moments import Moment, moment_of, return_to
from groupax.replay.trainer import ReplayTrainer
from groupax.training.influence import Influence, influence_of
from groupax.types import Rollout, Row

Numbers = Mapping[str, float | None]  # metrics; None for one that is not finite


@dataclass(frozen=True, eq=False)
class Cause:
    """The cause for which a metric fulfils a condition.

    Attributes:
        step: The step whose rows did it.
        shown_at: The step that fulfils the condition.
        under: The metrics of that step under the weights before each step, by the step.
        group: Indices of the completions of the groups without which it does not fulfil it; empty if no half of the
            groups did it alone.
        without_group: Numbers without these.
        left_out: Indices of the fewest of these completions without which it does not either.
        without: Numbers without those.
        metrics: Numbers of the update of `step`.
        influence: Influence of each completion of `step`; those that it did not train on have none.
        completions: Indices of these completions.
        rollouts: All completions of its rollout.
        num_updates: Updates that were computed to find it.
    """

    step: int
    shown_at: int
    under: Mapping[int, Numbers]
    group: tuple[int, ...]
    without_group: Numbers
    left_out: tuple[int, ...]
    without: Numbers
    metrics: Numbers
    influence: Influence
    completions: tuple[int, ...]
    rollouts: Sequence[Rollout]
    num_updates: int


class NoCauseError(ValueError):
    """The metrics of a condition do not follow from weights and completions."""


@dataclass(eq=False)
class Search:
    """A search for the cause. The trainer must be in its loop, and ends in another state than it had.

    Attributes:
        trainer: The replay.
        condition: What the metrics of the last moment fulfil.
        moments: Moments before the updates of consecutive steps, by the step.
        num_updates: Updates that were computed.
    """

    trainer: ReplayTrainer
    condition: Condition
    moments: Mapping[int, Moment]
    num_updates: int = 0
    _samples: bool = field(default=False, init=False)  # completions of other weights
    _drops: bool = field(default=False, init=False)  # rows that are left out, which have a gradient that is not finite

    def cause(self) -> Cause:
        """Returns the cause.

        Raises:
            NoCauseError: A metric of the condition depends on neither weights nor completions, or on completions that
                cannot be sampled again.
        """
        last = max(self.moments)
        self._check_metrics(last)
        under = {step: self._measured(self.moments[step], last) for step in self.moments}
        if not self.condition.holds(under[last]):
            raise NoCauseError("no single step fulfils it, only their mean, which metrics.jsonl has (logging_steps)")
        before = [step for step in self.moments if step < last and not self.condition.holds(under[step])]
        step = max(before) if before else last
        moment = self.moments[step]
        return_to(self.trainer.learner, moment)
        parts = moment.parts()
        influence = influence_of(self.trainer.learner, moment.rows, [*parts.values()])
        self._drops = bool(np.isnan(influence.norms).any())
        found = self._narrowed(step, last, parts, influence)
        metrics = self._updated(moment, moment.rows)
        given = influence, tuple(parts), moment.completions, self.num_updates
        return Cause(step, last, under, *found, metrics, *given)

    def _check_metrics(self, last: int) -> None:
        """Finds whether completions must be sampled again."""
        moment = self.moments[last]
        of_update = self._updated(moment, moment.rows)
        others = [name for name in self.condition.metrics if name not in of_update]
        unknown = [name for name in others if name not in moment.experience.metrics]
        if unknown:
            raise NoCauseError(f"{unknown[0]} follows from neither the weights nor the completions")
        self._samples = bool(others)
        collector, args = self.trainer.collector, self.trainer.args
        if self._samples and (collector.rules.has_turns or args.max_staleness or moment.experience.num_used):
            raise NoCauseError(
                f"{others[0]} is a metric of completions, which are not sampled again under other weights in a run "
                "with tools, environments, max_staleness or several updates on a rollout"
            )

    def _measured(self, moment: Moment, last: int, left_out: Sequence[int] = ()) -> Numbers:
        """Returns the metrics of the last step under the weights of a moment, without some of its rows."""
        shown = self.moments[last]
        if not self._samples:
            return self._updated(replace_state(shown, moment), self._without(shown.rows, left_out))
        learner, collector = self.trainer.learner, self.trainer.collector
        return_to(learner, moment)
        experience = collector.sampled_again(shown.cursor)
        return {**json_numbers(experience.metrics), **self._updated(moment, experience.next_rows())}

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
            rows = self.moments[number].rows
            rows = self._without(rows, left_out) if number == step else rows
            if any(row.mask.any() for row in rows):
                self.num_updates += 1
                learner.update(rows)
        return self._measured(self._here(self.moments[last]), last)

    def _without(self, rows: Sequence[Row], left_out: Sequence[int]) -> list[Row]:
        """Returns rows of which some count nowhere, in the shapes of before, whose programs are compiled."""
        gone = set(left_out)
        if self._drops:
            return [row for index, row in enumerate(rows) if index not in gone]
        hidden = {index: replace(rows[index], mask=np.zeros_like(rows[index].mask), is_failure=True) for index in gone}
        return [hidden.get(index, row) for index, row in enumerate(rows)]

    def _here(self, moment: Moment) -> Moment:
        return moment_of(self.trainer.learner, moment.experience, moment.cursor)

    def _narrowed(
        self, step: int, last: int, parts: Mapping[int, Sequence[int]], influence: Influence
    ) -> tuple[tuple[int, ...], Numbers, tuple[int, ...], Numbers]:
        """Returns the groups' completions without which the condition does not hold, and the fewest of these."""
        found: tuple[tuple[int, ...], Numbers] = (), {}
        order = dict(zip(parts, influence.shares, strict=True))
        if step == last and self._samples:  # all of its completions follow from the weights
            return *found, *found

        def cures(completions: Sequence[int]) -> bool:
            nonlocal found
            metrics = self._after(step, last, [row for each in completions for row in parts[each]])
            if self.condition.holds(metrics):
                return False
            found = tuple(completions), metrics
            return True

        completions = self.moments[step].completions
        groups: dict[int, list[int]] = {}
        for each in parts:
            groups.setdefault(completions[each].prompt_index, []).append(each)
        by_share = sorted(groups.values(), key=lambda own: _order(sum(order[each] for each in own)))
        halves = halved(by_share, lambda own: cures([each for members in own for each in members]))
        of_groups = found
        if len(halves) == 1:
            halved(sorted(halves[0], key=lambda each: _order(order[each])), cures)
        return *of_groups, *found


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
