"""A tracker that writes all it receives as lines of JSON."""

import json

from groupax.runs.trackers.tracker import Tracker

LINES = f"{__name__}:LinesTracker"


class LinesTracker(Tracker):
    """Appends to tracked.jsonl, after removing the lines of steps that will be repeated."""

    def __init__(self, run):
        self.path, kept = run.folder / "tracked.jsonl", []
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= run.first_step]
        self.path.write_text("".join(kept), encoding="utf-8")
        self.write("run", run.first_step, name=run.name, project=run.project, config=dict(run.config))

    def metrics(self, step, metrics):
        self.write("metrics", step, metrics=metrics)

    def samples(self, step, samples):
        self.write("samples", step, samples=samples)

    def histograms(self, step, values):
        self.write("histograms", step, values={name: each.tolist() for name, each in values.items()})

    def write(self, kind, step, **content):
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "step": step, **content}) + "\n")
