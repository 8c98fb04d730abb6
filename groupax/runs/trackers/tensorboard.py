"""TensorBoard: event files in `tensorboard/` of the run folder, written by tensorboardX. Imports no jax.

The format stores scalars as float32.
"""

import html
import json
from collections.abc import Mapping, Sequence

import numpy as np

from groupax.runs.trackers.tracker import Sample, TrackedRun, Tracker
from groupax.types import Metrics


class TensorBoardTracker(Tracker):
    """Adds an event file to the folder; TensorBoard ignores later steps of earlier files."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        purge_step = run.first_step + 1 if run.first_step else None
        # files have the name of the second in which they begin, which may be the same for a run that is continued
        suffix = f".{run.first_step:09d}"
        self.writer = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=purge_step, flush_secs=10, filename_suffix=suffix
        )
        text = html.escape(json.dumps(dict(run.config), indent=2))
        self.writer.add_text("config", f"<pre>{text}</pre>", run.first_step)

    def metrics(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def samples(self, samples: Sequence[Sample]) -> None:
        rows = [sample.row for sample in samples]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row.values()) + "</tr>" for row in rows
        )
        self.writer.add_text("samples", f"<table><tr>{head}</tr>{body}</table>", samples[0].step)

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        for name, each in values.items():
            self.writer.add_histogram(name, each, step)

    def diagnostic(self, step: int, name: str, text: str) -> None:
        self.writer.add_text(f"diagnostics/{name}", html.escape(text), step)

    def close(self) -> None:
        self.writer.close()
