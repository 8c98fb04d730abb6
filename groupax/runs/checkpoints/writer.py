"""Writes checkpoints in the background, and deletes old ones. Imports no jax.

    training        save(): arrays to the host ──► continues
    a thread                                  └──► files aside ► checksums ► sync to disk ► publish ► delete the oldest

If a checkpoint cannot be written, a message says so, and the earlier ones stay.
"""

import errno
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from groupax.core.settings.run import CheckpointSettings
from groupax.core.terminal.printable import error_line
from groupax.events import CheckpointSaved, Emit, Message
from groupax.runs.checkpoints.store import STATE, Store, seal


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A checkpoint to write."""

    step: int  # of the run
    state: str  # text of `state.json`
    start_writing: Callable[[Path], Callable[[], None]]  # of the arrays; returns a function that waits for them
    write_more: Callable[[Path], None]  # writes the other files into the folder
    published: Callable[[], None]  # called in the thread when the checkpoint is complete


class CheckpointWriter:
    """Writes checkpoints into a store, and emits which were saved and what went wrong.

    `before` is called in the thread before a checkpoint is published. `last_step` is the step of the newest complete
    one.
    """

    def __init__(self, store: Store, settings: CheckpointSettings, emit: Emit, before: Callable[[], None]) -> None:
        self.store, self.settings, self.emit, self.before = store, settings, emit, before
        self.last_step: int | None = None
        self._thread: threading.Thread | None = None
        self._published: int | None = None  # a checkpoint whose event is due
        self._failure: tuple[int, BaseException] | None = None
        self._due_s: float | None = None
        self._set_timer()

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due at this step."""
        every, by_time = self.settings.save_steps, self._due_s is not None and time.monotonic() >= self._due_s
        return self.last_step != step and ((every > 0 and step % every == 0) or by_time)

    def save(self, snapshot: Snapshot) -> None:
        """Starts to write a checkpoint; returns when its arrays may change."""
        self.wait()
        self._set_timer()
        folder = None
        try:
            folder = self.store.aside(snapshot.step)
            written = snapshot.start_writing(folder)
        except Exception as error:  # noqa: BLE001 - whatever a disk or an array library raises
            self._failed(snapshot.step, error, folder)
            self._report_failure()
            return
        self._thread = threading.Thread(target=self._complete, args=(snapshot, folder, written), name="checkpoint")
        self._thread.start()

    def newest(self) -> int | None:
        """Returns the step of the newest complete checkpoint, if it still exists."""
        try:
            steps = self.store.steps()
        except OSError:  # an unreachable store still has it
            return self.last_step
        return self.last_step if self.last_step in steps else None

    def wait(self) -> bool:
        """Waits for the checkpoint that is being written; returns whether the last one could be written."""
        if self._thread is not None:
            self._thread.join()
        return self.look()

    def look(self) -> bool:
        """Reports a checkpoint whose writing has ended; returns whether it could be written."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if self._published is not None:
                self.emit(CheckpointSaved(self._published, self.store.where(self._published)))
                self._published = None
            return self._report_failure()
        return True

    def _complete(self, snapshot: Snapshot, folder: Path, written: Callable[[], None]) -> None:
        """Completes a checkpoint, in the thread."""
        try:
            try:
                snapshot.write_more(folder)
            finally:
                written()
            (folder / STATE).write_text(snapshot.state, encoding="utf-8")
            seal(folder)
            self.before()
            self.store.publish(snapshot.step)
            self.last_step = self._published = snapshot.step
            snapshot.published()
            self._delete_surplus()
        except Exception as error:  # noqa: BLE001 - it is reported, and the run continues
            self._failed(snapshot.step, error, folder)

    def _failed(self, step: int, error: BaseException, folder: Path | None) -> None:
        self._failure = (step, error)
        if folder is not None:  # it may be what fills the disk
            shutil.rmtree(folder, ignore_errors=True)

    def _report_failure(self) -> bool:
        if self._failure is None:
            return True
        (step, error), self._failure = self._failure, None
        if self.last_step == step:
            self.emit(Message(f"after the checkpoint of step {step} was written: {_summary(error)}", warning=True))
            return True
        newest = self.newest()
        whole = f"the newest one is that of step {newest}" if newest else "there is none yet"
        self.emit(
            Message(
                f"the checkpoint of step {step} could not be written ({_summary(error)}); {whole}. Training continues "
                "until the next one is due; make room or repair the folder, or stop the run with SIGTERM",
                warning=True,
            )
        )
        return False

    def _set_timer(self) -> None:
        minutes = self.settings.save_interval_minutes
        self._due_s = time.monotonic() + 60 * minutes if minutes else None

    def _delete_surplus(self) -> None:
        """Deletes the oldest checkpoints beyond the limit, except the best one."""
        if not self.settings.save_total_limit:
            return
        steps = self.store.steps()
        keep = set(steps[-self.settings.save_total_limit :])
        best = self._best(steps)
        for step in steps:
            if step not in keep and step != best:
                self.store.delete(step)

    def _best(self, steps: list[int]) -> int | None:
        name = self.settings.metric_for_best_model
        if name is None:
            return None
        values = {step: self.store.state(step).get("metrics", {}).get(name) for step in steps}
        known = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
        sign = 1 if self.settings.greater_is_better else -1
        return max(known, key=lambda step: (sign * known[step], step), default=None)


def _summary(error: BaseException) -> str:
    """Returns an error in short; array libraries wrap the system's message into long texts."""
    full = os.strerror(errno.ENOSPC)
    return full if full in str(error) else error_line(error, 400) or type(error).__name__
