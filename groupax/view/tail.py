"""An incremental reader of JSON Lines files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groupax.storage.folders import open_file

MAX_LINE_BYTES = 16 * 2**20


class Tail:
    """A reader that yields every object of a growing JSON Lines file once.

    A last line without a newline is still being written and is left for a later call. A file that was replaced or
    truncated is read again from the start.

    Args:
        path: Path of the file, which need not exist.

    Attributes:
        generation: Number of times that the file was replaced or truncated.
        num_bad_lines: Number of lines that were not JSON objects.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = self.num_bad_lines = 0
        self._offset = self._inode = 0

    def new_objects(self) -> Iterator[dict[str, Any]]:
        """Yields the objects written since the last call. `generation` is up to date at the first object.

        Raises:
            OSError: The file exists and cannot be read.
        """
        if not self._has_more():
            return
        with open_file(self.path) as file:
            file.seek(self._offset)
            while line := file.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n"):
                    if len(line) < MAX_LINE_BYTES or not _skip_line(file):
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

    def whole_lines(self, num_bytes: int) -> bytes:
        """Returns the next whole lines of about that size, which `new_objects` still yields unless they are skipped.

        Returns fewer bytes at the end of the file, and nothing if a line is longer. `generation` is up to date.

        Raises:
            OSError: The file exists and cannot be read.
        """
        if not self._has_more():
            return b""
        with open_file(self.path) as file:
            file.seek(self._offset)
            block = file.read(num_bytes)
        return block[: block.rfind(b"\n") + 1]

    def skip(self, num_bytes: int) -> None:
        """Marks that many bytes as read."""
        self._offset += num_bytes

    def _has_more(self) -> bool:
        """Returns whether there is something to read, and starts again with a file that was replaced."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            self._restart(0)
            return False
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._restart(stat.st_ino)
        return stat.st_size > self._offset

    def _restart(self, inode: int) -> None:
        if self._offset:
            self.generation += 1
        self._offset = self.num_bad_lines = 0
        self._inode = inode


def _skip_line(file: Any) -> bool:
    """Reads to the end of the line; returns False if the file ends first."""
    while chunk := file.readline(MAX_LINE_BYTES):
        if chunk.endswith(b"\n"):
            return True
    return False
