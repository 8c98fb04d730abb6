"""A tracker in a thread of its own, so that whatever it does costs training nothing. Imports no jax."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Literal

from groupax.runs.trackers.tracker import TrackedRun, Tracker, open_tracker
from groupax.settings.reporting import TrackerName

MOST_WAITING = 256  # calls; further ones are dropped
CLOSE_S = 60.0  # how long the end of a run waits for its trackers

Call = Callable[[Tracker], None]


class BackgroundTracker:
    """Calls a tracker in a daemon thread.

        training:  tell ──► queue (bounded) ──► thread: open, call, call, ..., close

    A tracker that raises is given up, and one that is too slow misses calls; `faults` say so.

    Args:
        name: of the tracker.
        run: which run it is told of.
        opens: makes the tracker, in the thread.

    Attributes:
        faults: what went wrong, by kind: it is `slow`, it `failed`, it was `late` to end.
    """

    def __init__(
        self,
        name: TrackerName,
        run: TrackedRun,
        opens: Callable[[TrackerName, TrackedRun], Tracker] = open_tracker,
    ) -> None:
        self.name: TrackerName = name
        self.faults: dict[Literal["slow", "failed", "late"], str] = {}
        self._run, self._opens = run, opens
        self._calls: queue.Queue[Call | None] = queue.Queue(MOST_WAITING)
        self._failed = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Have the tracker called some time; returns at once."""
        if self._failed:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.faults["slow"] = (
                f"{self.name} is too slow: {MOST_WAITING} calls wait for it, and further ones are left out; "
                "metrics.jsonl has everything"
            )

    def finish(self) -> None:
        """Have the tracker closed when it has been told everything; returns at once."""
        self._ending.set()
        with contextlib.suppress(queue.Full):  # the thread sees `_ending` once it has worked through them
            self._calls.put_nowait(None)

    def wait(self, deadline_s: float) -> None:
        """Wait for the thread after `finish`, until `time.monotonic()` has come to the deadline."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self.faults["late"] = (
                f"{self.name} has not ended in time; what it has not written or sent may be missing there"
            )

    def _work(self) -> None:
        try:
            tracker = self._opens(self.name, self._run)
            while True:
                try:
                    call = self._calls.get(timeout=1.0)
                except queue.Empty:
                    if self._ending.is_set():
                        break
                    continue
                if call is None:
                    break
                call(tracker)
            tracker.close()
        except BaseException as error:  # noqa: BLE001 - of foreign code, which may even try to end the process
            self._failed = True
            self.faults["failed"] = (
                f"{self.name} failed and is told nothing more ({type(error).__name__}: {error}); training goes on, and "
                "metrics.jsonl has everything"
            )
