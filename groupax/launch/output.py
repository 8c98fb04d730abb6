"""The merged output of several processes, with a prefix before each line."""

import threading
from typing import IO

MAX_LINE_BYTES = 1 << 16  # longer lines are cut

_writing = threading.Lock()


def copy_lines(source: IO[bytes], target: IO[str], prefix: str) -> threading.Thread:
    """Starts a thread that copies lines until the source ends, without what progress bars overwrite.

    Args:
        source: Read end of a pipe.
        target: Destination, in which lines of several threads do not mix.
        prefix: Text before each line.
    """

    def copy() -> None:
        with source:
            while line := source.readline(MAX_LINE_BYTES):
                text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
                with _writing:
                    target.write(f"{prefix}{text}\n")
                    target.flush()

    thread = threading.Thread(target=copy, name=f"output {prefix}", daemon=True)
    thread.start()
    return thread
