"""Passes a run's events to its trackers, each of which has its own thread, so that training waits for none.

Imports no jax.
"""

import queue
import threading
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Literal

from groupax.core.config import RunConfig
from groupax.core.types import Metrics
from groupax.events import Diagnosed, Emit, Evaluated, Event, PhaseStarted, RunStarted, StepEnded
from groupax.runs.folder import RunFolder
from groupax.runs.trackers.tracker import TrackedRun, Tracker, finite, open_tracker, samples_of

MAX_WAITING = 256  # calls of a tracker; further ones are dropped
CLOSE_S = 60.0  # that the end of a run waits for its trackers
NUM_SAMPLES = 16  # completions of a step in a table
SAMPLES_INTERVAL_S = 30.0  # between two such tables

Call = Callable[[Tracker], None]


class Trackers:
    """Calls the trackers that `report_to` names, each in its own thread, and emits a `Diagnosed` event per fault.

    They receive completions if `shows_samples` is true.
    """

    def __init__(
        self, args: RunConfig, folder: RunFolder, num_steps: int, emit: Emit, shows_samples: bool = True
    ) -> None:
        self.args, self.folder, self.num_steps, self.emit = args, folder, num_steps, emit
        self.shows_samples = shows_samples
        self.running: list[BackgroundTracker] = []
        self._step = 0
        self._sampled_s = float("-inf")
        self._reported: set[str] = set()  # names of faults

    def __call__(self, event: Event) -> None:
        """Passes the event on; returns at once."""
        match event:
            case RunStarted(step=step):
                self._open(step)
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

    def close(self) -> None:
        """Closes the trackers, which share `CLOSE_S` seconds to write and send what they have."""
        if not self.running:
            return
        self.emit(PhaseStarted(f"sending to {', '.join(tracker.name for tracker in self.running)}"))
        for tracker in self.running:
            tracker.finish()
        deadline_s = time.monotonic() + CLOSE_S
        for tracker in self.running:
            tracker.wait(deadline_s)
        self._report_faults()
        self.running = []

    def _open(self, step: int) -> None:
        name = self.args.run_name or PurePath(self.folder.uri.rstrip("/")).name
        config = self.args.to_dict()
        run = TrackedRun(self.folder.id, name, self.args.project, self.folder.path, config, step)
        self.running = [BackgroundTracker(tracker, run) for tracker in self.args.report_to]

    def _metrics(self, step: int, metrics: Metrics) -> None:
        self._step, numbers = step, finite(metrics)
        self._call(lambda tracker: tracker.metrics(step, numbers))
        self._report_faults()

    def _samples(self, event: StepEnded) -> None:
        now_s = time.monotonic()
        is_due = now_s - self._sampled_s >= SAMPLES_INTERVAL_S or event.step == self.num_steps
        if is_due and self.shows_samples and event.rollouts:
            self._sampled_s = now_s
            self._call(lambda tracker: tracker.samples(samples_of(event.step, event.rollouts, NUM_SAMPLES)))

    def _call(self, call: Call) -> None:
        for tracker in self.running:
            tracker.submit(call)

    def _report_faults(self) -> None:
        for tracker in self.running:
            for kind, text in tracker.faults.copy().items():  # its thread may add one
                name = f"tracker_{tracker.name}_{kind}"
                if name not in self._reported:
                    self._reported.add(name)
                    self.emit(Diagnosed(self._step, name, text))


class BackgroundTracker:
    """Calls a tracker in a daemon thread.

        training:  submit ──► queue (bounded) ──► thread: open, call, call, ..., close

    A tracker that raises receives no further calls, one that is too slow misses calls, and one may not end in time:
    `faults` has texts about that, by kind. `opens` creates the tracker by its name, in the thread.
    """

    def __init__(self, name: str, run: TrackedRun, opens: Callable[[str, TrackedRun], Tracker] = open_tracker) -> None:
        self.name, self._run, self._opens = name, run, opens
        self.faults: dict[Literal["slow", "failed", "late"], str] = {}
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Queues a call of the tracker; returns at once."""
        if "failed" in self.faults:
            return
        if self._calls.qsize() < MAX_WAITING:
            self._calls.put(call)
        else:
            self.faults["slow"] = (
                f"{self.name} is too slow: {MAX_WAITING} calls wait for it, and further ones are dropped; "
                "metrics.jsonl has everything"
            )

    def finish(self) -> None:
        """Queues the end of the tracker; returns at once."""
        self._calls.put(None)

    def wait(self, deadline_s: float) -> None:
        """Waits for the thread after `finish`, at most until `time.monotonic()` reaches the deadline."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self.faults["late"] = (
                f"{self.name} has not ended in time; what it has not written or sent may be missing there"
            )

    def _work(self) -> None:
        try:
            tracker = self._opens(self.name, self._run)
            for call in iter(self._calls.get, None):
                call(tracker)
            tracker.close()
        except BaseException as error:  # noqa: BLE001 - foreign code, which may even raise SystemExit
            self.faults["failed"] = (
                f"{self.name} failed and receives nothing more ({type(error).__name__}: {error}); training continues, "
                "and metrics.jsonl has everything"
            )
