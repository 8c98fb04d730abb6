"""Weights & Biases. Imports no jax.

Its own environment variables say where it sends data: with WANDB_MODE=offline it writes files in `wandb/` of the run
folder, which `wandb sync` uploads.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupax.runs.trackers.tracker import Sample, TrackedRun, Tracker
from groupax.types import Metrics


class WandbTracker(Tracker):
    """Resumes the run of the same id if there is one.

    Raises:
        ValueError: It would send data to a server, but has no key.
    """

    @classmethod
    def check(cls) -> None:
        """Raises a ValueError without a key, for which wandb would prompt on the terminal and wait forever."""
        wandb: Any = importlib.import_module("wandb")
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "report_to has 'wandb', and it has no key: run `wandb login` before, set WANDB_API_KEY, or "
                "WANDB_MODE=offline"
            )

    def __init__(self, run: TrackedRun) -> None:
        self.check()
        self.wandb: Any = importlib.import_module("wandb")
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
        self.run.log({**metrics, "step": step})

    def samples(self, samples: Sequence[Sample]) -> None:
        rows = [sample.row for sample in samples]
        table = self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"samples": table, "step": samples[0].step})

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        self.run.log({**{name: self.wandb.Histogram(each.tolist()) for name, each in values.items()}, "step": step})

    def diagnostic(self, step: int, name: str, text: str) -> None:
        del step
        self.run.summary[f"diagnostics/{name}"] = text

    def close(self) -> None:
        self.run.finish()
