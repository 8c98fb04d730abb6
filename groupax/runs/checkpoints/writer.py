"""Writes checkpoints beside training, and keeps as many as it should. Imports no jax.

    training        save(): arrays to the host ──► goes on
    a thread                                  └──► files aside ► checksums ► on the disk ► publish ► delete the oldest

A checkpoint that cannot be written costs nothing but itself: that is told, the earlier ones stay, and it is tried
again.
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

from groupax.events import CheckpointSaved, Emit, Message
from groupax.runs.checkpoints.files import STATE, seal
from groupax.runs.checkpoints.store import Store
from groupax.settings.checkpoints import CheckpointSettings

RETRY_S = 30.0  # from a checkpoint that could not be written to the next try


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A checkpoint to be written.

    Attributes:
        step: of the run.
        state: the text of `state.json`.
        begin_writing: takes the folder; begins to write the arrays and returns a function that waits for them.
        write_more: takes the folder; writes what else there is.
    """

    step: int
    state: str
    begin_writing: Callable[[Path], Callable[[], None]]
    write_more: Callable[[Path], None]


class CheckpointWriter:
    """Writes checkpoints into a store.

    Args:
        store: where they lie.
        settings: when, and how many to keep.
        emit: Receives saved checkpoints and messages about faults.
        before: called in the thread before a checkpoint is published.
    """

    def __init__(self, store: Store, settings: CheckpointSettings, emit: Emit, before: Callable[[], None]) -> None:
        self.store, self.settings, self.emit, self.before = store, settings, emit, before
        self.last_step: int | None = None  # of the newest whole checkpoint
        self._thread: threading.Thread | None = None
        self._published: int | None = None  # a checkpoint whose event is due
        self._failure: tuple[int, BaseException] | None = None
        self._due_s: float | None = None
        self._set_timer()

    def due(self, step: int) -> bool:
        """Whether there should be a checkpoint at this step."""
        every, by_time = self.settings.save_steps, self._due_s is not None and time.monotonic() >= self._due_s
        return self.last_step != step and ((every > 0 and step % every == 0) or by_time)

    def save(self, snapshot: Snapshot) -> None:
        """Begin to write a checkpoint; returns when its arrays may change again."""
        self.wait()
        self._set_timer()
        folder = None
        try:
            folder = self.store.aside(snapshot.step)
            written = snapshot.begin_writing(folder)
        except Exception as error:  # noqa: BLE001 - whatever a disk or an array library raises
            self._failed(snapshot.step, error, folder)
            self._told_failure()
            return
        self._thread = threading.Thread(target=self._complete, args=(snapshot, folder, written), name="checkpoint")
        self._thread.start()

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint, if it is still there."""
        try:
            steps = self.store.steps()
        except OSError:  # its place does not answer, which is no reason to believe that it is gone
            return self.last_step
        return self.last_step if self.last_step in steps else None

    def wait(self) -> bool:
        """Wait for the checkpoint that is being written; returns whether it, or the one before it, could be written."""
        if self._thread is not None:
            self._thread.join()
        return self.look()

    def look(self) -> bool:
        """Tell of a checkpoint that could not be written, if that is known by now; returns whether there is none."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if self._published is not None:
                self.emit(CheckpointSaved(self._published, self.store.where(self._published)))
                self._published = None
            return self._told_failure()
        return True

    def _complete(self, snapshot: Snapshot, folder: Path, written: Callable[[], None]) -> None:
        """In the thread."""
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
            self._delete_surplus()
        except Exception as error:  # noqa: BLE001 - it is told, and the run goes on
            self._failed(snapshot.step, error, folder)

    def _failed(self, step: int, error: BaseException, folder: Path | None) -> None:
        self._failure = (step, error)
        if folder is not None:  # which may be what fills the disk
            shutil.rmtree(folder, ignore_errors=True)

    def _told_failure(self) -> bool:
        if self._failure is None:
            return True
        (step, error), self._failure = self._failure, None
        self._due_s = time.monotonic() + RETRY_S
        if self.last_step == step:
            self.emit(Message(f"after the checkpoint of step {step} was written: {_words(error)}", warning=True))
            return True
        newest = self.newest()
        whole = f"the newest one is that of step {newest}" if newest else "there is none yet"
        self.emit(
            Message(
                f"the checkpoint of step {step} could not be written ({_words(error)}); {whole}. Training continues "
                f"and tries again in {RETRY_S:.0f} s; {self._advice()}",
                warning=True,
            )
        )
        return False

    def _advice(self) -> str:
        try:
            free = f"{self.store.free_bytes() / 1e9:.2f} GB are free there"
        except OSError as error:
            free = f"its disk does not answer ({error})"
        return f"make room or mend the folder ({free}), or stop the run with SIGTERM"

    def _set_timer(self) -> None:
        minutes = self.settings.save_interval_minutes
        self._due_s = time.monotonic() + 60 * minutes if minutes else None

    def _delete_surplus(self) -> None:
        """Delete the oldest checkpoints beyond the limit, but never the best one."""
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


def _words(error: BaseException) -> str:
    """What an error says, in short; array libraries wrap the system's own words into many."""
    for words in map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)):
        if words in str(error):
            return words
    text = str(error).strip() or type(error).__name__
    return text if len(text) < 400 else f"{text[:397]}..."
