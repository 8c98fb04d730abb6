"""Progress of a slow command: a spinner with the seconds for each activity, or a line where there is no terminal."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from groupax.core.terminal.printable import printable


class Activities:
    """The activities of a command, of which several may be under way at once, and lines about what they found.

    On a terminal each activity is a line with a spinner that vanishes when it ends. Otherwise its start is printed.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._lock = console, threading.Lock()
        self._shown: Progress | None = None

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Shows an activity until the block ends. May be called in several threads."""
        if not self._console.is_terminal:
            self.note(f"{text} ...")
            yield
            return
        with self._lock:
            if self._shown is None:
                columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
                self._shown = Progress(
                    *columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
                )
                self._shown.start()
            shown = self._shown
            task = shown.add_task(printable(text))
        try:
            yield
        finally:
            with self._lock:
                shown.remove_task(task)
                if not shown.tasks:
                    shown.stop()
                    self._shown = None

    def note(self, text: str) -> None:
        """Prints a line above the activities."""
        with self._lock:
            self._console.print(printable(text), soft_wrap=True, markup=False, highlight=False)
