"""A live panel on a terminal. Imports no jax."""

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupax.data.tokenizer import last_text
from groupax.events import PhaseStarted
from groupax.runs.progress.display import (
    Progress,
    TimeLeft,
    clock,
    fact_lines,
    headline,
    status_fields,
)
from groupax.terminal.printable import one_line, printable, short_repr
from groupax.types import CallRecord, Metrics, Rollout

SAMPLE_CHARACTERS = 300  # of a completion, on a wide terminal
RESULT_CHARACTERS = 60  # of a call's result
SAMPLE_INTERVAL_S = 5.0  # on a terminal; a log receives a sample four times less often
LINE_INTERVAL_S = 2.0  # between two lines of a log about steps
SLOW_PHASE_S = 2.0  # before a log has a line about a phase of the start or the end
SLOW_STEP_PHASE_S = 60.0  # likewise about a phase of a step once steps have lines, and between two lines about a phase
REFRESHES_PER_S = 4
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@dataclass(frozen=True)
class Phase:
    """A stage of the run that is shown while it lasts.

    Attributes:
        name: Its name.
        started_s: When it started, by `time.monotonic`.
        total: Number of items, if they are counted.
        num_done: Number of items that are done.
    """

    name: str
    started_s: float
    total: int | None = None
    num_done: int = 0

    def __str__(self) -> str:
        if self.total is None:
            return self.name
        seconds, num_left = time.monotonic() - self.started_s, self.total - self.num_done
        is_known = self.num_done > 0 and seconds > SLOW_STEP_PHASE_S
        left = f", about {clock(seconds / self.num_done * num_left)} left" if is_known else ""
        return f"{self.name} {self.num_done:,}/{self.total:,}{left}"


class Rich(Progress):
    """A live panel on a terminal: bar, metrics, time left, phase, a sample group. Elsewhere it prints lines."""

    def __init__(self) -> None:
        super().__init__()
        from groupax.terminal.console import output_console

        self.console = output_console()
        self.is_live = self.console.is_interactive and sys.stdout.isatty()
        self.opened_s = time.monotonic()
        self.current: Phase | None = None
        self.step_printed = 0
        self.metrics: Mapping[str, float] = {}
        self.time_left = TimeLeft()
        self.headlines: deque[float] = deque(maxlen=60)
        self.sampled_s = self.line_s = float("-inf")
        self.shown_group: Sequence[Rollout] = ()
        self._live: Any = None
        self._timer: threading.Timer | None = None
        self._is_open = False

    def _open(self) -> None:
        self._is_open, self.opened_s = True, time.monotonic()
        if self.is_live:
            from groupax.terminal.panel import LivePanel

            self._live = LivePanel(self.console, self._panel, REFRESHES_PER_S)
            self._live.start()

    def _close(self) -> None:
        self._is_open = False
        self._stop_timer()
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self.step_printed < self.step_shown:  # the panel is erased, and a log skips steps
            self._print_line()

    def _describe(self, facts: Mapping[str, str]) -> None:
        self._message(fact_lines(facts, self.console.width if self.is_live else None), warning=False)

    def _phase(self, phase: PhaseStarted) -> None:
        self.current = Phase(phase.name, time.monotonic(), phase.total)
        if self._is_open and not self.is_live:
            self._start_timer(SLOW_STEP_PHASE_S if self._is_between_steps else SLOW_PHASE_S)

    def _advance(self, num_done: int) -> None:
        if self.current is not None:
            self.current = replace(self.current, num_done=num_done)

    def _step(self, metrics: Metrics) -> None:
        self.time_left.add(metrics)
        self.headlines.append(metrics[headline(metrics)])
        self.metrics, is_last = metrics, self.step_shown == self.num_steps
        if not self.is_live and (is_last or time.monotonic() - self.line_s > LINE_INTERVAL_S):
            self.line_s = time.monotonic()
            self._print_line()

    def _sample(self, group: Sequence[Rollout]) -> None:
        interval_s = SAMPLE_INTERVAL_S * (1 if self.is_live else 4)
        if time.monotonic() - self.sampled_s < interval_s:
            return
        self.sampled_s = time.monotonic()
        self.shown_group = group
        if not self.is_live:
            self.console.print(sample_panel(group))

    def _message(self, text: str, warning: bool) -> None:
        from rich.text import Text

        shown = printable(f"warning: {text}" if warning else text)
        self.console.print(Text(shown, style="yellow" if warning else ""), soft_wrap=True)

    def _print_line(self) -> None:
        self.step_printed = self.step_shown
        self.console.print("  ".join(self._fields()), markup=False, soft_wrap=True)

    def _fields(self) -> list[str]:
        """Returns the fields of the last step, most important first."""
        return status_fields(self.step_shown, self.num_steps, self.metrics, self.time_left)

    def _panel(self) -> Any:
        """Returns the renderable of the current state; called by the thread that draws it."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        width, parts = self.console.width, []
        if self.metrics:
            bar = Table.grid(expand=True)  # a bar alone ends no line, and what follows would be cut off
            bar.add_row(ProgressBar(total=self.num_steps, completed=self.step_shown))
            curve = one_line(f"{headline(self.metrics)} {sparkline(list(self.headlines))}", width)
            parts += [
                bar,
                Text(fitting(self._fields(), width), no_wrap=True),
                Text(curve, style="green", no_wrap=True),
            ]
        if self.current is not None:
            parts.append(Text(one_line(self._phase_line(self.current), width), style="cyan", no_wrap=True))
        if self.shown_group:
            parts.append(sample_panel(self.shown_group, min(SAMPLE_CHARACTERS, 2 * width)))
        return Group(*parts)

    def _phase_line(self, phase: Phase) -> str:
        now_s = time.monotonic()
        seconds = now_s - phase.started_s
        elapsed = f"  {clock(seconds)}" if seconds >= 1 else ""
        return f"{SPINNER[int(now_s * REFRESHES_PER_S) % len(SPINNER)]} {self._phase_text(phase)}{elapsed}"

    def _phase_text(self, phase: Phase) -> str:
        return f"{phase}: compiling (first time; kept for the next run)" if self.is_compiling() else str(phase)

    def _start_timer(self, seconds: float) -> None:
        """Prints a line about the phase after a while, unless another one starts before."""
        self._stop_timer()
        self._timer = threading.Timer(seconds, self._report_phase)
        self._timer.daemon = True
        self._timer.start()

    def _report_phase(self) -> None:
        phase = self.current
        if phase is not None and self._is_open:
            now_s = time.monotonic()
            seconds = f" (for {clock(now_s - phase.started_s)})" if now_s - phase.started_s > SLOW_STEP_PHASE_S else ""
            self._message(f"[{clock(now_s - self.opened_s)}] {self._phase_text(phase)}{seconds}", warning=False)
            self._start_timer(SLOW_STEP_PHASE_S)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def sample_panel(group: Sequence[Rollout], limit: int = SAMPLE_CHARACTERS) -> Any:
    """Returns a group's best, middle and worst completions with their rewards, as a rich table.

    On a terminal that is too narrow for a column per reward function, the rewards are above each completion.

    Args:
        group: Scored completions of one prompt.
        limit: Maximum number of characters of a completion.
    """
    from rich.cells import cell_len
    from rich.text import Text

    from groupax.terminal.tables import SAMPLE_COLUMNS, Fitting, empty_table, stacked

    title, names = f"prompt: {one_line(last_text(group[0].prompt))}", [printable(name) for name in group[0].rewards]
    table, entries = empty_table(title, expand=False), []
    for header in ("advantage", *names):
        table.add_column(Text(header), justify="right", min_width=cell_len(header))
    table.add_column("completion", overflow="fold", min_width=SAMPLE_COLUMNS)
    for row in picked_rows(group):
        rewards = ["-" if value is None else f"{value:.2f}" for value in row.rewards.values()]
        cells, text = (f"{row.advantage:+.2f}", *rewards), one_line(sample_text(row), limit)
        table.add_row(*cells, Text(text))
        labelled = zip(("advantage", *names), cells, strict=True)
        entries.append((", ".join(f"{label} {cell}" for label, cell in labelled), text))
    return Fitting(table, stacked(title, entries, show_lines=True))


def picked_rows(group: Sequence[Rollout]) -> list[Rollout]:
    """Returns the completions of a group with the highest, the middle and the lowest advantage."""
    ordered = sorted(group, key=lambda row: -row.advantage)
    return [ordered[index] for index in dict.fromkeys([0, len(ordered) // 2, len(ordered) - 1])]


def sample_text(rollout: Rollout) -> str:
    """Returns a completion's text; of an episode what the model said in its turns, its calls, and why it ended."""
    if not rollout.has_turns:
        return rollout.text
    lines = []
    for turn in rollout.turns:
        calls = [f"{call.name}({_arguments(call)}) = {call.result[:RESULT_CHARACTERS]}" for call in turn.calls]
        lines += [line for line in (turn.text, *calls) if line]
    return "\n".join([*lines, f"({rollout.finish_reason})"])


def _arguments(call: CallRecord) -> str:
    return ", ".join(f"{name}={short_repr(value)}" for name, value in call.arguments.items())


def sparkline(values: Sequence[float]) -> str:
    """Returns the values as a row of block characters, lowest to highest."""
    finite = [value for value in values if value == value]
    if not finite:
        return ""
    low, spread = min(finite), (max(finite) - min(finite)) or 1.0
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(" " if v != v else blocks[round((v - low) / spread * (len(blocks) - 1))] for v in values)


def fitting(fields: Sequence[str], width: int) -> str:
    """Returns as many of the first fields as fit on a line of this width."""
    line = ""
    for number, field in enumerate(fields):
        longer = f"{line}  {field}" if number else field
        if len(longer) > width:
            break
        line = longer
    return line
