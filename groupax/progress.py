"""What is shown while a run trains. Imports no jax."""

import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from groupax.metrics import json_numbers
from groupax.rollout import Rollout
from groupax.tokenizer import last_text

logger = logging.getLogger(__name__)

SHOWN = {
    "reward": "reward",
    "kl": "kl",
    "completions/mean_length": "length",
    "rollout/tokens_per_s": "rollout tok/s",
    "train/tokens_per_s": "train tok/s",
}
SAMPLE_INTERVAL_S = 5.0  # on a terminal; a log gets a sample four times less often


class Progress(Protocol):
    """A way to show a run."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """An optimizer step ended."""

    def sample(self, group: Sequence[Rollout]) -> None:
        """A scored group, offered after every rollout."""

    def message(self, text: str, warning: bool = False) -> None:
        """Something that the user should read; a warning asks for something to be done."""

    def close(self) -> None:
        """The run ended."""


class Silent:
    """Shows nothing; messages go to the log."""

    def __init__(self, num_steps: int) -> None:
        del num_steps

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def sample(self, group: Sequence[Rollout]) -> None:
        pass

    def message(self, text: str, warning: bool = False) -> None:
        logger.log(logging.WARNING if warning else logging.INFO, text)

    def close(self) -> None:
        pass


class JsonLines:
    """One JSON object per step on standard output, for programs that watch; numbers that are not finite are null."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        print(json.dumps({**json_numbers(metrics), "step": step, "num_steps": self.num_steps}), flush=True)

    def sample(self, group: Sequence[Rollout]) -> None:
        pass

    def message(self, text: str, warning: bool = False) -> None:
        print(json.dumps({"warning" if warning else "message": text}), flush=True)

    def close(self) -> None:
        pass


class Tqdm:
    """A tqdm bar."""

    def __init__(self, num_steps: int) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=num_steps, unit="step")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.bar.set_postfix({label: _number(metrics[name]) for name, label in SHOWN.items() if name in metrics})
        self.bar.update(step - self.bar.n)

    def sample(self, group: Sequence[Rollout]) -> None:
        pass

    def message(self, text: str, warning: bool = False) -> None:
        self.bar.write(f"warning: {text}" if warning else text)

    def close(self) -> None:
        self.bar.close()


class Rich:
    """A live panel on a terminal: bar, metrics, time left, a sample group. Elsewhere a line per few seconds."""

    def __init__(self, num_steps: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self.num_steps = num_steps
        self.started_s = time.monotonic()
        self.steps_before: int | None = None  # made by an earlier process
        self.console = Console(highlight=False)
        self.rewards: deque[float] = deque(maxlen=60)
        self.sampled_s = float("-inf")
        self.line_s = float("-inf")
        self.panel_sample: Any = None
        self.live = Live(console=self.console, refresh_per_second=4, transient=True)
        if self.console.is_terminal:
            self.live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        from rich.console import Group
        from rich.text import Text

        if self.steps_before is None:
            self.steps_before = step - 1
        line = self._line(step, metrics)
        self.rewards.append(metrics["reward"])
        if self.console.is_terminal:
            curve = Text(f"reward {sparkline(list(self.rewards))}", style="green")
            self.live.update(Group(self._bar(step), Text(line), curve, *filter(None, [self.panel_sample])))
        elif step == self.num_steps or time.monotonic() - self.line_s > 2.0:
            self.line_s = time.monotonic()
            self.console.print(line, markup=False, soft_wrap=True)

    def sample(self, group: Sequence[Rollout]) -> None:
        interval_s = SAMPLE_INTERVAL_S * (1 if self.console.is_terminal else 4)
        if time.monotonic() - self.sampled_s < interval_s:
            return
        self.sampled_s = time.monotonic()
        self.panel_sample = sample_panel(group)
        if not self.console.is_terminal:
            self.console.print(self.panel_sample)

    def message(self, text: str, warning: bool = False) -> None:
        from rich.text import Text

        self.console.print(Text(f"warning: {text}", style="yellow") if warning else Text(text), soft_wrap=True)

    def close(self) -> None:
        self.live.stop()

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        elapsed_s = time.monotonic() - self.started_s
        left_s = elapsed_s / (step - (self.steps_before or 0)) * (self.num_steps - step)
        shown = "  ".join(f"{label} {_number(metrics[name])}" for name, label in SHOWN.items() if name in metrics)
        return f"step {step}/{self.num_steps}  {shown}  eta {_clock(left_s)}"

    def _bar(self, step: int) -> Any:
        from rich.progress_bar import ProgressBar

        return ProgressBar(total=self.num_steps, completed=step)


def sample_panel(group: Sequence[Rollout], num_shown: int = 3) -> Any:
    """A group's best, middle and worst completions with their rewards, as a rich table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"prompt: {printable(last_text(group[0].prompt))}"), title_justify="left", expand=False)
    table.add_column("advantage", justify="right")
    for name in group[0].rewards:
        table.add_column(Text(name), justify="right")
    table.add_column("completion", overflow="fold")
    ordered = sorted(group, key=lambda row: -row.advantage)
    picked = dict.fromkeys([0, len(ordered) // 2, len(ordered) - 1][:num_shown])
    for row in (ordered[index] for index in picked):
        rewards = ["-" if value is None else f"{value:.2f}" for value in row.rewards.values()]
        table.add_row(f"{row.advantage:+.2f}", *rewards, Text(printable(row.text, 300)))
    return table


def sparkline(values: Sequence[float]) -> str:
    """The values as a row of block characters, lowest to highest."""
    finite = [value for value in values if value == value]
    if not finite:
        return ""
    low, spread = min(finite), (max(finite) - min(finite)) or 1.0
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(" " if v != v else blocks[round((v - low) / spread * (len(blocks) - 1))] for v in values)


# By `GRPOConfig.progress_bar`.
PROGRESS_BARS: dict[str, type[Silent] | type[JsonLines] | type[Tqdm] | type[Rich]] = {
    "rich": Rich,
    "tqdm": Tqdm,
    "json": JsonLines,
    "none": Silent,
}


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def printable(text: str, limit: int = 160) -> str:
    """The text on one line of at most `limit` characters, without control characters."""
    plain = "".join(c if c.isprintable() else " " for c in text.replace("\n", "⏎"))
    return plain if len(plain) <= limit else f"{plain[: limit - 1]}…"
