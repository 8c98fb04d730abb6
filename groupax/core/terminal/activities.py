"""Progress of a slow command: a spinner with the seconds for each activity, or a line where there is no terminal."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from groupax.core.terminal.printable import printable


class Activities:
    """The activities of a command, of which several may be under way at once, and lines about what they found.

    On a terminal each activity is a line with a spinner that vanishes when it ends. Otherwise its start is printed.

    Args:
        console: Where they are shown.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._shown: Progress | None = None
        self._num_running = 0

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Shows an activity until the block ends. May be called in several threads."""
        task = self._started(text)
        try:
            yield
        finally:
            self._ended(task)

    def note(self, text: str) -> None:
        """Prints a line above the activities."""
        with self._lock:
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(printable(text), soft_wrap=True, markup=False, highlight=False)

    def _started(self, text: str) -> TaskID | None:
        with self._lock:
            self._num_running += 1
            if not self._console.is_terminal:
                self._print(f"{text} ...")
                return None
            if self._shown is None:
                columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
                self._shown = Progress(
                    *columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
                )
                self._shown.start()
            return self._shown.add_task(printable(text))

    def _ended(self, task: TaskID | None) -> None:
        with self._lock:
            self._num_running -= 1
            if self._shown is None or task is None:
                return
            self._shown.remove_task(task)
            if not self._num_running:
                self._shown.stop()
                self._shown = None
