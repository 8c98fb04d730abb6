"""A run in the cell of a notebook, which changes in place. Imports no jax."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from groupax.data.tokenizer import last_text
from groupax.events import PhaseStarted
from groupax.runs.progress.display import (
    Progress,
    TimeLeft,
    clock,
    headline,
    short_number,
    shown_metrics,
    status_fields,
)
from groupax.runs.progress.rich import SAMPLE_CHARACTERS, SAMPLE_INTERVAL_S, picked_rows, sample_text
from groupax.terminal.notebook import curve_html, details_html, escaped, facts_html, table_html
from groupax.terminal.printable import one_line, printable
from groupax.types import Metrics, Rollout

INTERVAL_S = 0.5  # between two changes of the cell
MAX_MESSAGES = 12


class Notebook(Progress):
    """A cell with what the run is, its phase, a curve, the last metrics, a sample group and messages."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: Mapping[str, str] = {}
        self.phase: tuple[str, int, int | None] = ("", 0, None)  # name, number of items done, and of all
        self.metrics: Metrics = {}
        self.headlines: list[float] = []
        self.first_step = 1
        self.messages: deque[str] = deque(maxlen=MAX_MESSAGES)
        self.group: Sequence[Rollout] = ()
        self.time_left = TimeLeft()
        self._cell: Any = None
        self._cell_number = 0
        self._drawn_s = self._sampled_s = float("-inf")

    def _open(self) -> None:
        from IPython.core.getipython import get_ipython

        number = getattr(get_ipython(), "execution_count", 0)
        if number != self._cell_number:  # in the same cell of the notebook the output keeps changing in place
            self._cell, self._cell_number = None, number
            self.facts = {} if self._drawn_s > 0 else self.facts
            self.metrics, self.headlines, self.group = {}, [], ()
            self.messages.clear()
        self._draw()

    def _close(self) -> None:
        self.phase = ("", 0, None)
        self._draw()

    def _describe(self, facts: Mapping[str, str]) -> None:
        self.facts = facts
        self._draw()

    def _phase(self, phase: PhaseStarted) -> None:
        self.phase = (phase.name, 0, phase.total)
        self._draw(at_once=not self._is_between_steps)

    def _advance(self, num_done: int) -> None:
        name, _, total = self.phase
        self.phase = (name, num_done, total)
        self._draw(at_once=False)

    def _sample(self, group: Sequence[Rollout]) -> None:
        if time.monotonic() - self._sampled_s > SAMPLE_INTERVAL_S:
            self._sampled_s, self.group = time.monotonic(), group

    def _step(self, metrics: Metrics) -> None:
        if not self.metrics:
            self.first_step = self.step_shown
        self.time_left.add(metrics)
        self.metrics = metrics
        self.headlines.append(metrics[headline(metrics)])
        self._draw(at_once=self.step_shown == self.num_steps)

    def _message(self, text: str, warning: bool) -> None:
        shown = f"warning: {text}" if warning else text
        if self._depth == 0:
            print(printable(shown))
            return
        self.messages.append(shown)
        self._draw()

    def _draw(self, at_once: bool = True) -> None:
        """Shows the present state, but no earlier than `INTERVAL_S` after the last time unless it must be seen."""
        is_open = self._depth > 0 or self._cell is not None
        if not is_open or (not at_once and time.monotonic() - self._drawn_s < INTERVAL_S):
            return
        from IPython.display import HTML, display

        self._drawn_s = time.monotonic()
        if self._cell is None:
            self._cell = display(HTML(self.html()), display_id=True)
        else:
            self._cell.update(HTML(self.html()))

    def html(self) -> str:
        """Returns the content of the cell."""
        parts = [facts_html(self.facts)] if self.facts else []
        if self.metrics:
            left = self.time_left
            fields = status_fields(self.step_shown, self.num_steps, self.metrics, left)
            parts += [
                curve_html(self.headlines, headline(self.metrics), self.first_step),
                f"<div>{escaped('  ·  '.join(fields))}</div>",
            ]
        name, num_done, total = self.phase
        if name:
            compiling = " (compiling; kept for the next run)" if self.is_compiling() else ""
            counts = "" if total is None else f" {num_done:,}/{total:,}"
            parts.append(f'<div style="opacity:.65">{escaped(name + counts + compiling)} …</div>')
        if self.group:
            parts.append(_group_html(self.group))
        if self.messages:
            parts.append(table_html([[message] for message in self.messages]))
        return "".join(parts)


def result_html(num_steps: int, seconds: float, metrics: Metrics, more: Mapping[str, str]) -> str:
    """Returns the result of a training as a table with the main metrics of its last step, and one with all of them.

    Args:
        num_steps: Optimizer steps.
        seconds: Wall time.
        metrics: Metrics of the last logged step.
        more: Further facts by label.
    """
    main = {
        label: short_number(value)
        for name, label in shown_metrics(metrics).items()
        if (value := metrics[name]) is not None
    }
    facts = {"steps": f"{num_steps:,}", "time": clock(seconds), **more, **main}
    every = facts_html({name: "-" if value is None else f"{value:.6g}" for name, value in metrics.items()})
    return facts_html(facts, "Training") + details_html("all metrics of the last step", every)


def _group_html(group: Sequence[Rollout]) -> str:
    """Returns the best, the middle and the worst completion of a group."""
    rows = [
        [
            f"{row.advantage:+.2f}",
            *("-" if value is None else f"{value:.2f}" for value in row.rewards.values()),
            one_line(sample_text(row), SAMPLE_CHARACTERS),
        ]
        for row in picked_rows(group)
    ]
    title = f"prompt: {one_line(last_text(group[0].prompt))}"
    return table_html(rows, ["advantage", *group[0].rewards, "completion"], title)
