"""The displays that `progress_bar` names. Imports no jax."""

import json
from collections.abc import Mapping
from typing import Any

from groupax.events import Event, PhaseStarted
from groupax.metrics.completions import json_numbers
from groupax.parallel import processes
from groupax.runs.progress.display import Progress, fact_lines, short_number, shown_metrics
from groupax.runs.progress.notebook import Notebook
from groupax.runs.progress.rich import Rich
from groupax.terminal.notebook import in_notebook
from groupax.terminal.printable import printable
from groupax.types import Metrics


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


class Tqdm(Progress):
    """A tqdm bar."""

    def __init__(self) -> None:
        super().__init__()
        self.bar: Any = None

    def _open(self) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=self.num_steps or None, initial=self.step_shown, unit="step")

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _describe(self, facts: Mapping[str, str]) -> None:
        self.bar.total = self.num_steps
        self._message(fact_lines(facts), warning=False)

    def _phase(self, phase: PhaseStarted) -> None:
        if self.bar is not None:
            self.bar.set_description(phase.name, refresh=not self._is_between_steps)

    def _step(self, metrics: Metrics) -> None:
        self.bar.set_postfix({label: short_number(metrics[name]) for name, label in shown_metrics(metrics).items()})
        self.bar.update(self.step_shown - self.bar.n)

    def _message(self, text: str, warning: bool) -> None:
        from tqdm import tqdm

        tqdm.write(printable(f"warning: {text}" if warning else text))


# By `GRPOConfig.progress_bar`.
PROGRESS_BARS: dict[str, type[Progress]] = {"rich": Rich, "tqdm": Tqdm, "json": JsonLines, "none": Progress}


def progress_named(name: str) -> Progress:
    """Returns the display that `progress_bar` names, or a silent one if another process is going to show the run.

    In a notebook "rich" is a cell that changes in place.
    """
    if not processes.may_be_primary():
        return Silent()
    return Notebook() if name == "rich" and in_notebook() else PROGRESS_BARS[name]()


def primary_only(progress: Progress) -> Progress:
    """Returns the display in the primary process, which alone shows the run, and a silent one in the others."""
    if processes.is_primary():
        return progress
    progress.close()
    return Silent()


def _print_json(line: Mapping[str, Any]) -> None:
    print(json.dumps(line), flush=True)
