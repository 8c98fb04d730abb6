"""The displays that `progress_bar` names: a live panel, JSON lines. Imports no jax."""

import contextlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len
from rich.console import Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from groupax.core.terminal.printable import one_line, printable
from groupax.core.terminal.tables import SAMPLE_COLUMNS, Fitting, empty_table, output_console, stacked
from groupax.core.types import Metrics, Rollout
from groupax.data.tokenizer import last_text
from groupax.events import Event, PhaseStarted
from groupax.parallel import processes
from groupax.rollouts.completions import json_numbers
from groupax.runs.progress.display import (
    Progress,
    TimeLeft,
    clock,
    fact_lines,
    fitting,
    headline,
    sample_text,
    short_number,
    shown_metrics,
    sparkline,
)

SAMPLE_CHARACTERS = 300  # of a completion, on a wide terminal
SAMPLE_INTERVAL_S = 5.0  # on a terminal; a log receives a sample four times less often
LINE_INTERVAL_S = 2.0  # between two lines of a log about steps
SLOW_PHASE_S = 2.0  # before a log has a line about a phase of the start or the end
SLOW_STEP_PHASE_S = 60.0  # likewise about a phase of a step once steps have lines, and between two lines about a phase
REFRESHES_PER_S = 4
CELL_INTERVAL_S = 0.5  # between two changes of a notebook's cell
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@dataclass(frozen=True)
class Phase:
    """A stage of the run that is shown while it lasts."""

    name: str
    started_s: float  # when it started, by `time.monotonic`
    total: int | None = None  # number of items, if they are counted
    num_done: int = 0

    def __str__(self) -> str:
        if self.total is None:
            return self.name
        seconds, num_left = time.monotonic() - self.started_s, self.total - self.num_done
        is_known = self.num_done > 0 and seconds > SLOW_STEP_PHASE_S
        left = f", about {clock(seconds / self.num_done * num_left)} left" if is_known else ""
        return f"{self.name} {self.num_done:,}/{self.total:,}{left}"


class Silent(Progress):
    """A display that ignores all events, messages included."""

    def __call__(self, event: Event) -> None:
        """Ignores the event."""


class JsonLines(Progress):
    """One JSON object per step on standard output, for programs that watch; numbers that are not finite are null.

    The phases before the first step and after the last one have lines too.
    """

    def _describe(self, facts: Mapping[str, str]) -> None:
        _print_json({"run": dict(facts)})

    def _phase(self, phase: PhaseStarted) -> None:
        if not self._is_between_steps:
            _print_json({"phase": phase.name} if phase.total is None else {"phase": phase.name, "total": phase.total})

    def _step(self, metrics: Metrics) -> None:
        _print_json({**json_numbers(metrics), "step": self.step_shown, "num_steps": self.num_steps})

    def _message(self, text: str, warning: bool) -> None:
        _print_json({"warning" if warning else "message": text})


class Rich(Progress):
    """A live panel on a terminal: bar, metrics, time left, phase, a sample group. Elsewhere it prints lines."""

    def __init__(self) -> None:
        super().__init__()
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
        self._redirection = contextlib.ExitStack()
        self._timer: threading.Timer | None = None
        self._is_open = False

    def _open(self) -> None:
        self._is_open, self.opened_s = True, time.monotonic()
        if self.is_live:
            self._start_live()

    def _start_live(self) -> None:
        redirect = self._redirection.enter_context
        redirect(contextlib.redirect_stdout(redirect(_Above(self.console, sys.stdout))))
        redirect(contextlib.redirect_stderr(redirect(_Above(self.console, sys.stderr))))
        self._live = Live(
            console=self.console,
            get_renderable=self._panel,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def close(self) -> None:
        self._is_open = False
        self._stop_timer()
        self._redirection.close()
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self.step_printed < self.step_shown:  # the panel is erased, and a log skips steps
            self._print_line()

    def _describe(self, facts: Mapping[str, str]) -> None:
        self._message(fact_lines(facts), warning=False)

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
        shown = printable(f"warning: {text}" if warning else text)
        self.console.print(Text(shown, style="yellow" if warning else ""), soft_wrap=True)

    def _print_line(self) -> None:
        self.step_printed = self.step_shown
        self.console.print("  ".join(self._fields()), markup=False, soft_wrap=True)

    def _fields(self) -> list[str]:
        """Returns texts about the last step, most important first: its number, the time left, metrics, its seconds."""
        fields, num_left = [f"step {self.step_shown:,}/{self.num_steps:,}"], self.num_steps - self.step_shown
        left_s, step_s = (self.time_left.seconds(number) for number in (num_left, 1))
        if left_s is not None and num_left > 0:
            fields.append(f"eta {clock(left_s)}")
        shown = [f"{label} {short_number(self.metrics[name])}" for name, label in shown_metrics(self.metrics).items()]
        return fields + shown[:1] + ([f"{short_number(step_s)} s/step"] if step_s else []) + shown[1:]

    def _panel(self) -> Any:
        """Returns the renderable of the current state; called by the thread that draws it."""
        width, parts = self.console.width, []
        if self.metrics:
            bar = Table.grid(expand=True)  # a bar alone ends no line, and what follows would be cut off
            bar.add_row(ProgressBar(total=self.num_steps, completed=self.step_shown))
            curve = one_line(f"{headline(self.metrics)} {sparkline(list(self.headlines))}", width)
            parts += [bar, Text(fitting(self._fields(), width), no_wrap=True)]
            parts += [Text(curve, style="green", no_wrap=True)]
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
        phase, now_s = self.current, time.monotonic()
        if phase is not None and self._is_open:
            seconds = f" (for {clock(now_s - phase.started_s)})" if now_s - phase.started_s > SLOW_STEP_PHASE_S else ""
            self._message(f"[{clock(now_s - self.opened_s)}] {self._phase_text(phase)}{seconds}", warning=False)
            self._start_timer(SLOW_STEP_PHASE_S)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Above(FileProxy):
    """A standard stream that is printed above the panel, line by line; rich would read parts of lines as markup."""

    _is_within_line = False

    def write(self, text: str) -> int:
        self._is_within_line = not text.endswith("\n") if text else self._is_within_line
        return super().write(text)

    def flush(self) -> None:
        """Waits for the end of the line."""

    def __exit__(self, *_: object) -> None:
        if self._is_within_line:
            self.write("\n")


class Notebook(Rich):
    """The panel in the output of a notebook's cell, which rich turns into HTML and which changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.is_live, self._drawn_s = True, float("-inf")

    def __call__(self, event: Event) -> None:
        """Shows an event."""
        super().__call__(event)
        if self._live is not None and time.monotonic() - self._drawn_s > CELL_INTERVAL_S:
            self._draw()

    def _start_live(self) -> None:
        from IPython.display import display

        self._live = display(Table.grid(), display_id=True)

    def close(self) -> None:
        self.current = None
        self._draw()
        self._live = None
        super().close()

    def _draw(self) -> None:
        if self._live is not None:
            self._drawn_s = time.monotonic()
            cell = Table.grid()  # rich shows notebooks tables, but no groups
            cell.add_row(self._panel())
            self._live.update(cell)

    def _print_line(self) -> None:
        """Prints nothing: the panel stays."""


def sample_panel(group: Sequence[Rollout], limit: int = SAMPLE_CHARACTERS) -> Any:
    """Returns a group's best, middle and worst completions with their rewards, as a rich table.

    On a terminal that is too narrow for a column per reward function, the rewards are above each completion, of which
    at most `limit` characters are shown.
    """
    title, names = f"prompt: {one_line(last_text(group[0].prompt))}", [printable(name) for name in group[0].rewards]
    table, entries = empty_table(title, expand=False), []
    for header in ("advantage", *names):
        table.add_column(Text(header), justify="right", min_width=cell_len(header))
    table.add_column("completion", overflow="fold", min_width=SAMPLE_COLUMNS)
    ordered = sorted(group, key=lambda row: -row.advantage)
    for row in (ordered[index] for index in dict.fromkeys([0, len(ordered) // 2, len(ordered) - 1])):
        rewards = ["-" if value is None else f"{value:.2f}" for value in row.rewards.values()]
        cells, text = (f"{row.advantage:+.2f}", *rewards), one_line(sample_text(row), limit)
        table.add_row(*cells, Text(text))
        labelled = zip(("advantage", *names), cells, strict=True)
        entries.append((", ".join(f"{label} {cell}" for label, cell in labelled), text))
    return Fitting(table, stacked(title, entries, show_lines=True))


# By `GRPOConfig.progress_bar`.
PROGRESS_BARS: dict[str, type[Progress]] = {"rich": Rich, "json": JsonLines, "none": Progress}


def progress_named(name: str) -> Progress:
    """Returns the display that `progress_bar` names, or a silent one if another process is going to show the run.

    In a notebook "rich" is a cell that changes in place.
    """
    if not processes.may_be_primary():
        return Silent()
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    in_notebook = getattr(shell, "kernel", None) is not None
    return Notebook() if name == "rich" and in_notebook else PROGRESS_BARS[name]()


def primary_only(progress: Progress) -> Progress:
    """Returns the display in the primary process, which alone shows the run, and a silent one in the others."""
    if processes.is_primary():
        return progress
    progress.close()
    return Silent()


def _print_json(line: Mapping[str, Any]) -> None:
    print(json.dumps(line), flush=True)
