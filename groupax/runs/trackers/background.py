"""A tracker in its own thread, so that training never waits for it. Imports no jax."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Literal

from groupax.runs.trackers.tracker import TrackedRun, Tracker, open_tracker

MAX_WAITING = 256  # calls; further ones are dropped
CLOSE_S = 60.0  # that the end of a run waits for its trackers

Call = Callable[[Tracker], None]


class BackgroundTracker:
    """Calls a tracker in a daemon thread.

        training:  submit ──► queue (bounded) ──► thread: open, call, call, ..., close

    A tracker that raises receives no further calls, and one that is too slow misses calls; both are `faults`.

    Args:
        name: Name of the tracker.
        run: The run that it records.
        opens: Creates the tracker, in the thread.

    Attributes:
        faults: Texts by kind: `slow`, `failed`, or `late` if it did not end in time.
    """

    def __init__(
        self,
        name: str,
        run: TrackedRun,
        opens: Callable[[str, TrackedRun], Tracker] = open_tracker,
    ) -> None:
        self.name = name
        self.faults: dict[Literal["slow", "failed", "late"], str] = {}
        self._run, self._opens = run, opens
        self._calls: queue.Queue[Call | None] = queue.Queue(MAX_WAITING)
        self._failed = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Queues a call of the tracker; returns at once."""
        if self._failed:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.faults["slow"] = (
                f"{self.name} is too slow: {MAX_WAITING} calls wait for it, and further ones are dropped; "
                "metrics.jsonl has everything"
            )

    def finish(self) -> None:
        """Queues the end of the tracker; returns at once."""
        self._ending.set()
        with contextlib.suppress(queue.Full):  # the thread looks at `_ending` when the queue is empty
            self._calls.put_nowait(None)

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
        except BaseException as error:  # noqa: BLE001 - foreign code, which may even raise SystemExit
            self._failed = True
            self.faults["failed"] = (
                f"{self.name} failed and receives nothing more ({type(error).__name__}: {error}); training continues, "
                "and metrics.jsonl has everything"
            )
