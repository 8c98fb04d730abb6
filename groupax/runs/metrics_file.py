"""The file `metrics.jsonl` of a run, which only grows and survives its deletion. Imports no jax."""

import contextlib
import os
from pathlib import Path

NAME = "metrics.jsonl"


class MetricsFile:
    """Appends lines to `metrics.jsonl`, and keeps it open so that its content outlives its name.

    Attributes:
        size: Number of valid bytes; a line that was not written completely is not valid.
    """

    def __init__(self) -> None:
        self.size = 0
        self._descriptor = -1

    def open(self, folder: Path) -> None:
        """Follows the file in this folder from now on."""
        self.close()
        self._descriptor = os.open(folder / NAME, os.O_RDONLY)

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def append(self, folder: Path, data: bytes) -> None:
        """Appends to the valid content of the file in the folder.

        Raises:
            OSError: It cannot be written; the file is as it was.
        """
        with (folder / NAME).open("r+b", buffering=0) as file:
            try:
                file.seek(self.size)
                num_written = 0
                while num_written < len(data):
                    num_written += file.write(data[num_written:])
            except OSError:
                file.truncate(self.size)
                raise
        self.size += len(data)

    def text(self) -> str:
        """Returns the valid content, even if the file was deleted or moved."""
        return os.pread(self._descriptor, self.size, 0).decode() if self._descriptor >= 0 else ""

    def moved_to(self) -> str:
        """Returns the folder that the file was moved to, if it was moved and the system knows where."""
        if self._descriptor < 0 or os.fstat(self._descriptor).st_nlink == 0:
            return ""
        with contextlib.suppress(OSError):
            return str(Path(f"/proc/self/fd/{self._descriptor}").readlink().parent)
        return ""

    def sync(self, folder: Path) -> None:
        """Flushes the file in the folder to the disk."""
        with (folder / NAME).open("rb") as file:
            os.fsync(file.fileno())
