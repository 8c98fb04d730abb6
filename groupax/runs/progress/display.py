"""The base of all displays, which shows nothing. Imports no jax."""

import logging
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupax.core.terminal.printable import printable, short_repr
from groupax.core.types import Metrics, Rollout
from groupax.events import (
    Diagnosed,
    Evaluated,
    Event,
    Message,
    PhaseAdvanced,
    PhaseStarted,
    RolloutScored,
    RunDescribed,
    StepEnded,
)

logger = logging.getLogger(__name__)

SHOWN = {
    "reward": "reward",
    "loss": "loss",
    "kl": "kl",
    "completions/mean_length": "length",
    "rollout/tokens_per_s": "rollout tok/s",
    "train/tokens_per_s": "train tok/s",
}
OF_SUPERVISED = ("loss",)  # not shown where there are rewards
COMPILE_FRAC = 0.1  # a step that spends more of its time compiling is not representative of later ones
ETA_STEPS = 30
RESULT_CHARACTERS = 60  # of a call's result


class Progress:
    """A sink of a run's events that shows nothing and passes messages to the log; other displays derive from it.

    It is a context manager. Contexts nest, and the outermost one opens and closes the display.

    Attributes:
        num_steps: Number of optimizer steps of the run, 0 until it is known.
        step_shown: Last optimizer step that was shown.
        is_compiling: Returns whether a program is being compiled.
        shows_samples: Whether to show completions.
    """

    def __init__(self) -> None:
        self.num_steps = self.step_shown = 0
        self.is_compiling: Callable[[], bool] = lambda: False
        self.shows_samples = True
        self._depth = 0

    def __enter__(self) -> "Progress":
        self._depth += 1
        if self._depth == 1:
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.close()

    def __call__(self, event: Event) -> None:
        """Shows an event."""
        match event:
            case RunDescribed():
                self.num_steps = event.num_steps
                self._describe(event.facts)
            case PhaseStarted():
                self._phase(event)
            case PhaseAdvanced():
                self._advance(event.num_done)
            case RolloutScored():
                if self.shows_samples and event.groups:
                    self._sample(max(event.groups, key=lambda group: max(row.advantage for row in group)))
            case StepEnded():
                self.step_shown = event.step
                self._step(event.metrics)
            case Evaluated():
                for name, each in event.sets.items():
                    self._message(_evaluation_line(event.step, name, each), warning=False)
                if not event.sets:
                    self._message(f"step {event.step}: {_losses(event.metrics)}", warning=False)
            case Message() | Diagnosed():
                self._message(event.text, isinstance(event, Diagnosed) or event.warning)
            case _:
                pass

    def close(self) -> None:
        """Stops showing the run; a second call does nothing."""

    def _open(self) -> None:
        """Starts showing the run."""

    def _describe(self, facts: Mapping[str, str]) -> None:
        """Shows what the run is."""

    def _phase(self, phase: PhaseStarted) -> None:
        """Shows what the run does from now on."""

    def _advance(self, num_done: int) -> None:
        """Shows how many items of the phase are done."""

    def _sample(self, group: Sequence[Rollout]) -> None:
        """Shows a scored group."""

    def _step(self, metrics: Metrics) -> None:
        """Shows the metrics of step `step_shown`."""

    def _message(self, text: str, warning: bool) -> None:
        logger.log(logging.WARNING if warning else logging.INFO, printable(text))

    @property
    def _is_between_steps(self) -> bool:
        """Returns whether steps have been shown and more will follow."""
        return 0 < self.step_shown < self.num_steps


def headline(metrics: Mapping[str, float]) -> str:
    """Returns the name of the metric that a run is about: the reward, or the loss if nothing gives rewards."""
    return "reward" if "reward" in metrics else "loss"


def headline_text(metrics: Mapping[str, float]) -> str:
    """Returns the metric that a run is about with its value, and the number of the others."""
    name = headline(metrics)
    if name not in metrics:
        return "no metrics"
    return f"{name} {short_number(metrics[name])} and {len(metrics) - 1} further metrics"


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns the labels of the metrics to show, by name."""
    hidden = () if headline(metrics) == "loss" else OF_SUPERVISED
    return {name: label for name, label in SHOWN.items() if name in metrics and name not in hidden}


class TimeLeft:
    """An estimate of the remaining time from the last steps that did not have to compile."""

    def __init__(self) -> None:
        self._step_s: deque[float] = deque(maxlen=ETA_STEPS)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Adds a step by its metrics `step_time` and `time/compile_s`."""
        step_s = metrics.get("step_time", 0.0)
        if metrics.get("time/compile_s", 0.0) <= COMPILE_FRAC * step_s:
            self._step_s.append(step_s)

    def seconds(self, num_steps: int) -> float | None:
        """Returns how long this many further steps take, or None while every step had to compile."""
        return statistics.median(self._step_s) * num_steps if self._step_s else None


def fact_lines(facts: Mapping[str, str]) -> str:
    """Returns the facts as lines with aligned labels."""
    indent = max(map(len, facts), default=0) + 2
    return "\n".join(f"{label:{indent}}{printable(text)}" for label, text in facts.items())


def short_number(value: float) -> str:
    """Returns the number in few characters."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def clock(seconds: float) -> str:
    """Returns the time as M:SS or H:MM:SS."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def _evaluation_line(step: int, name: str, evaluation: Any) -> str:
    shown = [f"{key} {evaluation.estimates[key]}" for key in ("pass@1", "reward") if key in evaluation.estimates]
    return f"step {step}: {name} ({len(evaluation.items)} prompts): {', '.join(shown) or 'no reward applies'}"


def _losses(metrics: Metrics) -> str:
    losses = {name: value for name, value in metrics.items() if name.endswith("loss")}
    return ", ".join(f"{name} {short_number(value)}" for name, value in losses.items())


def sample_text(rollout: Rollout) -> str:
    """Returns a completion's text; of an episode what the model said in its turns, its calls, and why it ended."""
    if not rollout.has_turns:
        return rollout.text
    lines = []
    for turn in rollout.turns:
        lines += [turn.text] if turn.text else []
        for call in turn.calls:
            arguments = ", ".join(f"{name}={short_repr(value)}" for name, value in call.arguments.items())
            lines.append(f"{call.name}({arguments}) = {call.result[:RESULT_CHARACTERS]}")
    return "\n".join([*lines, f"({rollout.finish_reason})"])


def sparkline(values: Sequence[float], width: int | None = None) -> str:
    """Returns the values as a row of block characters, lowest to highest; at most `width` of them, evenly spread."""
    if width is not None and len(values) > width:
        values = [values[round(index * (len(values) - 1) / (width - 1))] for index in range(width)]
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
