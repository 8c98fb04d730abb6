"""Weights & Biases. Where it sends to, if anywhere, is said by its own variables: WANDB_MODE=offline writes files in
`wandb/` of the run folder, which `wandb sync` uploads. Imports no jax."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupax.runs.trackers.tracker import Sample, TrackedRun
from groupax.types import Metrics


class WandbTracker:
    """A run of the same id each time that the run goes on, which wandb takes for one.

    Raises:
        ValueError: it would send to a server, and there is no key for it.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.wandb: Any = importlib.import_module("wandb")
        # it would ask for a key where the run's progress is shown, and wait for one without end
        if self.wandb.setup().settings.mode == "online" and not self.wandb.login(prompt=False, verify=False):
            raise ValueError("it has no key: run `wandb login` before, set WANDB_API_KEY, or WANDB_MODE=offline")
        self.run: Any = self.wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=self.wandb.Settings(console="off"),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def metrics(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        self.run.log({**metrics, "step": step})

    def samples(self, samples: Sequence[Sample]) -> None:
        """See `Tracker`."""
        rows = [sample.row for sample in samples]
        table = self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"samples": table, "step": samples[0].step})

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """See `Tracker`."""
        self.run.log({**{name: self.wandb.Histogram(each.tolist()) for name, each in values.items()}, "step": step})

    def diagnostic(self, step: int, name: str, text: str) -> None:
        """See `Tracker`."""
        del step
        self.run.summary[f"diagnostics/{name}"] = text

    def close(self) -> None:
        """See `Tracker`."""
        self.run.finish()


def open_tracker(run: TrackedRun) -> WandbTracker:
    """See `tracker.open_tracker`."""
    return WandbTracker(run)
