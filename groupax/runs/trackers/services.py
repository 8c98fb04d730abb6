"""The built-in trackers. Imports no jax.

* wandb: its own environment variables say where it sends data; with WANDB_MODE=offline it writes files in `wandb/` of
  the run folder, which `wandb sync` uploads.
* tensorboard: event files in `tensorboard/` of the run folder, by tensorboardX. The format stores scalars as float32.
* trackio: a local database in TRACKIO_DIR, which `trackio show` shows.
"""

import html
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupax.core.terminal.printable import printable
from groupax.core.terminal.tables import table_html
from groupax.core.types import Metrics
from groupax.runs.diagnostics import Severity, severity_of
from groupax.runs.trackers.tracker import TrackedRun, Tracker

LEVELS: dict[Severity, str] = {"error": "error", "warning": "warn", "note": "info"}  # trackio's levels of alerts


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

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.run.log({"samples": self.wandb.Table(**_columns(samples)), "step": step})

    def diagnostic(self, step: int, name: str, text: str) -> None:
        del step
        self.run.summary[f"diagnostics/{name}"] = text

    def close(self) -> None:
        self.run.finish()


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

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        table = _columns(samples)
        self.writer.add_text("samples", table_html(table["data"], table["columns"]), step)

    def diagnostic(self, step: int, name: str, text: str) -> None:
        self.writer.add_text(f"diagnostics/{name}", html.escape(text), step)

    def close(self) -> None:
        self.writer.close()


class TrackioTracker(Tracker):
    """Resumes the run of the same name if there is one."""

    def __init__(self, run: TrackedRun) -> None:
        self.trackio: Any = importlib.import_module("trackio")
        name = f"{run.name}-{run.id}"
        self.run: Any = self.trackio.init(run.project, name, config=dict(run.config), resume="allow", embed=False)

    def metrics(self, step: int, metrics: Metrics) -> None:
        self.run.log(metrics, step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.run.log({"samples": self.trackio.Table(**_columns(samples))}, step=step)

    def diagnostic(self, step: int, name: str, text: str) -> None:
        level = self.trackio.AlertLevel(LEVELS[severity_of(name)])
        self.run.alert(printable(name), printable(text), level, step)  # it prints both

    def close(self) -> None:
        self.run.finish()


def _columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the names of the columns and the rows of a table of samples."""
    return {"columns": list(samples[0]), "data": [list(row.values()) for row in samples]}
