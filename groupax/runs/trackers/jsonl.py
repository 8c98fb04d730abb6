"""JSON lines in `tracked.jsonl` of the run folder, with everything that trackers receive. Imports no jax.

Each line has `kind` ("run", "metrics", "samples", "histograms" or "diagnostic") and `step`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupax.runs.folder import TRACKED
from groupax.runs.trackers.tracker import Sample, TrackedRun, Tracker
from groupax.types import Metrics


class JsonLinesTracker(Tracker):
    """Appends to the file, after removing the lines of steps that will be repeated."""

    def __init__(self, run: TrackedRun) -> None:
        self.path = run.folder / TRACKED
        kept = []
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= run.first_step]
        self.path.write_text("".join(kept), encoding="utf-8")
        self._write("run", run.first_step, id=run.id, name=run.name, project=run.project, config=dict(run.config))

    def metrics(self, step: int, metrics: Metrics) -> None:
        self._write("metrics", step, metrics=metrics)

    def samples(self, samples: Sequence[Sample]) -> None:
        self._write("samples", samples[0].step, samples=[sample.row for sample in samples])

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        self._write("histograms", step, values={name: each.tolist() for name, each in values.items()})

    def diagnostic(self, step: int, name: str, text: str) -> None:
        self._write("diagnostic", step, name=name, text=text)

    def _write(self, kind: str, step: int, **content: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "step": step, **content}) + "\n")
