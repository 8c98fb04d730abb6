"""Trackio: a local database in TRACKIO_DIR, which `trackio show` shows. Imports no jax."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupax.runs.severity import Severity, severity_of
from groupax.runs.trackers.tracker import Sample, TrackedRun, Tracker
from groupax.terminal.printable import printable
from groupax.types import Metrics

# Names of trackio's levels of alerts.
LEVELS: dict[Severity, str] = {"error": "error", "warning": "warn", "note": "info"}


class TrackioTracker(Tracker):
    """Resumes the run of the same name if there is one."""

    def __init__(self, run: TrackedRun) -> None:
        self.trackio: Any = importlib.import_module("trackio")
        name = f"{run.name}-{run.id}"
        self.run: Any = self.trackio.init(run.project, name, config=dict(run.config), resume="allow", embed=False)

    def metrics(self, step: int, metrics: Metrics) -> None:
        self.run.log(metrics, step=step)

    def samples(self, samples: Sequence[Sample]) -> None:
        rows = [sample.row for sample in samples]
        table = self.trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"samples": table}, step=samples[0].step)

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        self.run.log({name: self.trackio.Histogram(each) for name, each in values.items()}, step=step)

    def diagnostic(self, step: int, name: str, text: str) -> None:
        level = self.trackio.AlertLevel(LEVELS[severity_of(name)])
        self.run.alert(printable(name), printable(text), level, step)  # it prints both

    def close(self) -> None:
        self.run.finish()
