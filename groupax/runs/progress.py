"""What is shown while a run trains. Imports no jax."""

import json
import logging
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from groupax.data.tokenizer import last_text
from groupax.metrics.completions import json_numbers
from groupax.parallel import processes
from groupax.terminal.printable import one_line, printable
from groupax.types import Rollout

logger = logging.getLogger(__name__)
T = TypeVar("T")

SHOWN = {
    "reward": "reward",
    "kl": "kl",
    "completions/mean_length": "length",
    "rollout/tokens_per_s": "rollout tok/s",
    "train/tokens_per_s": "train tok/s",
}
SAMPLE_CHARACTERS = 300  # of a completion, on a wide terminal
SAMPLE_INTERVAL_S = 5.0  # on a terminal; a log gets a sample four times less often
LINE_INTERVAL_S = 2.0  # between two lines of a log about steps
SLOW_PHASE_S = 2.0  # before a log has a line about a phase of the start or the end
SLOW_STEP_PHASE_S = 60.0  # likewise about a phase of a step once steps have lines, and between two lines about a phase
REFRESHES_PER_S = 4
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
COMPILE_FRAC = 0.1  # a step that has spent more of its time compiling says nothing about the next ones
ETA_STEPS = 30


@dataclass(frozen=True)
class Phase:
    """A stage of a run, which is shown while it lasts.

    Attributes:
        name: in words.
        began_s: when, by `time.monotonic`.
        total: how many items there are to do, if they are counted.
        done: how many of them are done.
    """

    name: str
    began_s: float
    total: int | None = None
    done: int = 0

    def __str__(self) -> str:
        return self.name if self.total is None else f"{self.name} {self.done:,}/{self.total:,}"


class TimeLeft:
    """An estimate of the time that the steps left will take, from the last ones that did not have to compile."""

    def __init__(self) -> None:
        self._step_s: deque[float] = deque(maxlen=ETA_STEPS)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take a step into account, by its metrics `step_time` and `time/compile_s`."""
        step_s = metrics.get("step_time", 0.0)
        if metrics.get("time/compile_s", 0.0) <= COMPILE_FRAC * step_s:
            self._step_s.append(step_s)

    def seconds(self, num_steps: int) -> float | None:
        """Returns how long so many further steps take, or None as long as every step had to compile."""
        return statistics.median(self._step_s) * num_steps if self._step_s else None


class Progress:
    """Shows nothing; messages go to the log. The other ways to show a run derive from this one.

    It is a context in which the run is shown. Contexts nest, and the outermost one closes it.

    Attributes:
        num_steps: optimizer steps of the run, once they are known.
        step_shown: the last optimizer step that was shown.
        is_compiling: whether a program is being compiled at the moment.
    """

    def __init__(self) -> None:
        self.num_steps = self.step_shown = 0
        self.is_compiling: Callable[[], bool] = lambda: False
        self._depth = 0

    def __enter__(self) -> "Progress":
        self._depth += 1
        if self._depth == 1:
            self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.close()

    def open(self) -> None:
        """Begin to show the run."""

    def close(self) -> None:
        """Show nothing more of the run; called twice it does nothing."""

    def begin(self, num_steps: int, facts: Mapping[str, str]) -> None:
        """Show what the run is.

        Args:
            num_steps: optimizer steps of the run.
            facts: what a user wants to know of it at the start, by label.
        """
        del facts
        self.num_steps = num_steps

    def phase(self, name: str, total: int | None = None) -> None:
        """Show what the run is doing from now on, and of how many items it consists if they will be counted."""

    def advance(self, done: int) -> None:
        """Show how many items of the phase are done."""

    def counted(self, items: Iterable[T], name: str, total: int, afterwards: str) -> Iterator[T]:
        """Yields the items while the phase `name` counts them; then the phase `afterwards` begins."""
        self.phase(name, total)
        for done, item in enumerate(items, start=1):
            self.advance(done)
            yield item
        self.phase(afterwards)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that an optimizer step has ended."""

    def sample(self, group: Sequence[Rollout]) -> None:
        """Show a scored group; called after every rollout."""

    def message(self, text: str, warning: bool = False) -> None:
        """Show something that the user should read; a warning asks for something to be done."""
        logger.log(logging.WARNING if warning else logging.INFO, printable(text))

    @property
    def _is_between_steps(self) -> bool:
        """Whether steps have been shown and more are to come."""
        return 0 < self.step_shown < self.num_steps


class JsonLines(Progress):
    """One JSON object per step on standard output, for programs that watch; numbers that are not finite are null.

    The phases before the first step and after the last one have lines too.
    """

    def begin(self, num_steps: int, facts: Mapping[str, str]) -> None:
        super().begin(num_steps, facts)
        print(json.dumps({"run": dict(facts)}), flush=True)

    def phase(self, name: str, total: int | None = None) -> None:
        if not self._is_between_steps:
            print(json.dumps({"phase": name} if total is None else {"phase": name, "total": total}), flush=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step_shown = step
        print(json.dumps({**json_numbers(metrics), "step": step, "num_steps": self.num_steps}), flush=True)

    def message(self, text: str, warning: bool = False) -> None:
        print(json.dumps({"warning" if warning else "message": text}), flush=True)


class Tqdm(Progress):
    """A tqdm bar."""

    def __init__(self) -> None:
        super().__init__()
        self.bar: Any = None

    def open(self) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=self.num_steps or None, initial=self.step_shown, unit="step")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def begin(self, num_steps: int, facts: Mapping[str, str]) -> None:
        super().begin(num_steps, facts)
        self.bar.total = num_steps
        self.message(_fact_lines(facts))

    def phase(self, name: str, total: int | None = None) -> None:
        del total
        if self.bar is not None:
            self.bar.set_description(name, refresh=not self._is_between_steps)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step_shown = step
        self.bar.set_postfix({label: _number(metrics[name]) for name, label in SHOWN.items() if name in metrics})
        self.bar.update(step - self.bar.n)

    def message(self, text: str, warning: bool = False) -> None:
        from tqdm import tqdm

        tqdm.write(printable(f"warning: {text}" if warning else text))


class Rich(Progress):
    """A live panel on a terminal: bar, metrics, time left, what the run is doing, a sample group. Elsewhere lines."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console

        self.console = Console(highlight=False)
        self.is_live = self.console.is_interactive and sys.stdout.isatty()
        self.opened_s = time.monotonic()
        self.current: Phase | None = None
        self.step_printed = 0
        self.metrics: Mapping[str, float] = {}
        self.time_left = TimeLeft()
        self.rewards: deque[float] = deque(maxlen=60)
        self.sampled_s = self.line_s = float("-inf")
        self.shown_group: Sequence[Rollout] = ()
        self._live: Any = None
        self._timer: threading.Timer | None = None
        self._is_open = False

    def open(self) -> None:
        self._is_open, self.opened_s = True, time.monotonic()
        if self.is_live:
            from groupax.terminal.panel import LivePanel

            self._live = LivePanel(self.console, self._panel, REFRESHES_PER_S)
            self._live.start()

    def close(self) -> None:
        self._is_open = False
        self._stop_timer()
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self.step_printed < self.step_shown:  # nothing of the panel stays, and a log leaves steps out
            self._print_line()

    def begin(self, num_steps: int, facts: Mapping[str, str]) -> None:
        super().begin(num_steps, facts)
        self.message(_fact_lines(facts))

    def phase(self, name: str, total: int | None = None) -> None:
        self.current = Phase(name, time.monotonic(), total)
        if self._is_open and not self.is_live:
            self._tell_later(SLOW_STEP_PHASE_S if self._is_between_steps else SLOW_PHASE_S)

    def advance(self, done: int) -> None:
        if self.current is not None:
            self.current = replace(self.current, done=done)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.time_left.add(metrics)
        self.rewards.append(metrics["reward"])
        self.step_shown, self.metrics = step, metrics
        if not self.is_live and (step == self.num_steps or time.monotonic() - self.line_s > LINE_INTERVAL_S):
            self.line_s = time.monotonic()
            self._print_line()

    def sample(self, group: Sequence[Rollout]) -> None:
        interval_s = SAMPLE_INTERVAL_S * (1 if self.is_live else 4)
        if time.monotonic() - self.sampled_s < interval_s:
            return
        self.sampled_s = time.monotonic()
        self.shown_group = group
        if not self.is_live:
            self.console.print(sample_panel(group))

    def message(self, text: str, warning: bool = False) -> None:
        from rich.text import Text

        shown = printable(f"warning: {text}" if warning else text)
        self.console.print(Text(shown, style="yellow" if warning else ""), soft_wrap=True)

    def _print_line(self) -> None:
        self.step_printed = self.step_shown
        self.console.print("  ".join(self._fields()), markup=False, soft_wrap=True)

    def _fields(self) -> list[str]:
        """What is shown of the last step, the most important first."""
        fields = [f"step {self.step_shown:,}/{self.num_steps:,}"]
        left_s = self.time_left.seconds(self.num_steps - self.step_shown)
        if left_s is not None and self.step_shown < self.num_steps:
            fields.append(f"eta {_clock(left_s)}")
        return fields + [
            f"{label} {_number(self.metrics[name])}" for name, label in SHOWN.items() if name in self.metrics
        ]

    def _panel(self) -> Any:
        """What is on the terminal now; called by the thread that draws it."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        width, parts = self.console.width, []
        if self.metrics:
            bar = Table.grid(expand=True)  # a bar alone ends no line, and what follows would be cut off
            bar.add_row(ProgressBar(total=self.num_steps, completed=self.step_shown))
            reward = one_line(f"reward {sparkline(list(self.rewards))}", width)
            parts += [
                bar,
                Text(fitting(self._fields(), width), no_wrap=True),
                Text(reward, style="green", no_wrap=True),
            ]
        if self.current is not None:
            parts.append(Text(one_line(self._phase_line(self.current), width), style="cyan", no_wrap=True))
        if self.shown_group:
            parts.append(sample_panel(self.shown_group, min(SAMPLE_CHARACTERS, 2 * width)))
        return Group(*parts)

    def _phase_line(self, phase: Phase) -> str:
        now_s = time.monotonic()
        seconds = now_s - phase.began_s
        elapsed = f"  {_clock(seconds)}" if seconds >= 1 else ""
        return f"{SPINNER[int(now_s * REFRESHES_PER_S) % len(SPINNER)]} {self._phase_text(phase)}{elapsed}"

    def _phase_text(self, phase: Phase) -> str:
        return f"{phase}: compiling (first time; kept for the next run)" if self.is_compiling() else str(phase)

    def _tell_later(self, seconds: float) -> None:
        """Have a line about the phase in the log, unless another one begins before."""
        self._stop_timer()
        self._timer = threading.Timer(seconds, self._tell_phase)
        self._timer.daemon = True
        self._timer.start()

    def _tell_phase(self) -> None:
        phase = self.current
        if phase is not None and self._is_open:
            now_s = time.monotonic()
            seconds = f" (for {_clock(now_s - phase.began_s)})" if now_s - phase.began_s > SLOW_STEP_PHASE_S else ""
            self.message(f"[{_clock(now_s - self.opened_s)}] {self._phase_text(phase)}{seconds}")
            self._tell_later(SLOW_STEP_PHASE_S)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def sample_panel(group: Sequence[Rollout], limit: int = SAMPLE_CHARACTERS) -> Any:
    """Returns a group's best, middle and worst completions with their rewards, as a rich table.

    Args:
        group: scored completions of one prompt.
        limit: most characters of a completion.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"prompt: {one_line(last_text(group[0].prompt))}"), title_justify="left", expand=False)
    table.add_column("advantage", justify="right")
    for name in group[0].rewards:
        table.add_column(Text(printable(name)), justify="right")
    table.add_column("completion", overflow="fold")
    ordered = sorted(group, key=lambda row: -row.advantage)
    picked = dict.fromkeys([0, len(ordered) // 2, len(ordered) - 1])
    for row in (ordered[index] for index in picked):
        rewards = ["-" if value is None else f"{value:.2f}" for value in row.rewards.values()]
        table.add_row(f"{row.advantage:+.2f}", *rewards, Text(one_line(row.text, limit)))
    return table


def sparkline(values: Sequence[float]) -> str:
    """The values as a row of block characters, lowest to highest."""
    finite = [value for value in values if value == value]
    if not finite:
        return ""
    low, spread = min(finite), (max(finite) - min(finite)) or 1.0
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(" " if v != v else blocks[round((v - low) / spread * (len(blocks) - 1))] for v in values)


def fitting(fields: Sequence[str], width: int) -> str:
    """Returns the fields on one line, without the last ones that a line of this width has no room for."""
    line = ""
    for number, field in enumerate(fields):
        longer = f"{line}  {field}" if number else field
        if len(longer) > width:
            break
        line = longer
    return line


# By `GRPOConfig.progress_bar`.
PROGRESS_BARS: dict[str, type[Progress]] = {"rich": Rich, "tqdm": Tqdm, "json": JsonLines, "none": Progress}


def progress_named(name: str) -> Progress:
    """Returns the way to show a run that `progress_bar` names; nothing is shown where another process will show it."""
    return PROGRESS_BARS[name]() if processes.may_be_primary() else Progress()


def shown_by_the_first(progress: Progress) -> Progress:
    """Returns the progress, or in all processes but the first, which alone shows the run, one that shows nothing."""
    if processes.is_primary():
        return progress
    progress.close()
    return Progress()


def _fact_lines(facts: Mapping[str, str]) -> str:
    width = max(map(len, facts), default=0)
    return "\n".join(f"{label:{width}}  {fact}" for label, fact in facts.items())


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
