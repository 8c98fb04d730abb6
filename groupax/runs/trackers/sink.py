"""Passes a run's events to its trackers. Imports no jax."""

import time
from collections.abc import Callable
from pathlib import PurePath

from groupax.core.config import RunConfig
from groupax.core.types import Metrics
from groupax.events import Diagnosed, Emit, Evaluated, Event, PhaseStarted, RunStarted, StepEnded
from groupax.runs.diagnostics import tracker_diagnostics
from groupax.runs.folder import RunFolder
from groupax.runs.trackers.tracker import TrackedRun, Tracker, finite, open_tracker, samples_of

NUM_SAMPLES = 16  # completions of a step in a table
SAMPLES_INTERVAL_S = 30.0  # between two such tables


class Trackers:
    """Calls the trackers that `report_to` names. One that raises is reported as a diagnostic and not called again.

    They receive completions if `shows_samples` is true.
    """

    def __init__(
        self, args: RunConfig, folder: RunFolder, num_steps: int, emit: Emit, shows_samples: bool = True
    ) -> None:
        self.args, self.folder, self.num_steps, self.emit = args, folder, num_steps, emit
        self.shows_samples = shows_samples
        self.running: dict[str, Tracker] = {}
        self._step = 0
        self._sampled_s = float("-inf")

    def __call__(self, event: Event) -> None:
        """Passes the event on."""
        match event:
            case RunStarted(step=step):
                self._step = step
                name = self.args.run_name or PurePath(self.folder.uri.rstrip("/")).name
                config = self.args.to_dict()
                run = TrackedRun(self.folder.id, name, self.args.project, self.folder.path, config, step)
                for tracker in self.args.report_to:
                    self._try(
                        tracker, lambda tracker=tracker: self.running.update({tracker: open_tracker(tracker, run)})
                    )
            case StepEnded(step=step):
                if event.logged is not None:
                    self._metrics(step, event.logged)
                    self._samples(event)
            case Evaluated(step=step):
                self._metrics(step, event.metrics)
            case Diagnosed(step, name, text):
                self._call(lambda tracker: tracker.diagnostic(step, name, text))
            case _:
                pass

    def ended(self, why: str) -> None:
        """Passes on why the run ended before its last step."""
        self._call(lambda tracker: tracker.diagnostic(self._step, "ended", why))

    def close(self) -> None:
        """Closes the trackers, which write and send what they have."""
        if self.running:
            self.emit(PhaseStarted(f"sending to {', '.join(self.running)}"))
        while self.running:
            name, tracker = self.running.popitem()
            self._try(name, tracker.close)

    def _metrics(self, step: int, metrics: Metrics) -> None:
        self._step, numbers = step, finite(metrics)
        self._call(lambda tracker: tracker.metrics(step, numbers))

    def _samples(self, event: StepEnded) -> None:
        now_s = time.monotonic()
        is_due = now_s - self._sampled_s >= SAMPLES_INTERVAL_S or event.step == self.num_steps
        if is_due and self.shows_samples and event.rollouts:
            self._sampled_s = now_s
            samples = samples_of(event.step, event.rollouts, NUM_SAMPLES)
            self._call(lambda tracker: tracker.samples(event.step, samples))

    def _call(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in [*self.running.items()]:
            self._try(name, lambda tracker=tracker: call(tracker))

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code
            self.running.pop(name, None)
            for kind, text in tracker_diagnostics({name: f"{type(error).__name__}: {error}"}).items():
                self.emit(Diagnosed(self._step, kind, text))
