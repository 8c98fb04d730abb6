"""JSON Lines files, read while they grow."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST_LINE_BYTES = 16 * 2**20


class Tail:
    """A reader that returns each object of a JSON Lines file once.

    A last line without its newline is still being written, and is returned later. Lines that are no objects are
    counted. A file that was replaced or has become shorter is read again from its start.

    Args:
        path: Path of the file, which need not exist.

    Attributes:
        generation: Number of times that the file has started again.
        num_bad_lines: Number of lines that were no JSON objects.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = self.num_bad_lines = 0
        self._offset = self._inode = 0

    def new_objects(self) -> Iterator[dict[str, Any]]:
        """Yields what was written since the last call. `generation` is up to date before the first object.

        Raises:
            OSError: The file exists and cannot be read.
        """
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            self._start_over(0)
            return
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._start_over(stat.st_ino)
        if stat.st_size == self._offset:
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while line := file.readline(LONGEST_LINE_BYTES):
                if not line.endswith(b"\n"):
                    if len(line) < LONGEST_LINE_BYTES or not _skip_line(file):
                        return
                    line = b""
                self._offset = file.tell()
                try:
                    content = json.loads(line)
                except (ValueError, RecursionError):
                    content = None
                if isinstance(content, dict):
                    yield content
                else:
                    self.num_bad_lines += 1

    def _start_over(self, inode: int) -> None:
        if self._offset:
            self.generation += 1
        self._offset = self.num_bad_lines = 0
        self._inode = inode


def _skip_line(file: Any) -> bool:
    """Reads to the end of a line and returns whether it has one."""
    while part := file.readline(LONGEST_LINE_BYTES):
        if part.endswith(b"\n"):
            return True
    return False
