"""The output of several processes, line by line, each with the name of where it came from."""

import threading
from typing import IO

LONGEST_LINE = 1 << 16  # bytes; longer ones are cut

_writing = threading.Lock()


def copied(source: IO[bytes], target: IO[str], prefix: str) -> threading.Thread:
    """A thread that copies lines until the source ends. What a progress bar overwrites is left out.

    Args:
        source: the end of a pipe that is read.
        target: where lines go; those of several threads do not mix.
        prefix: put before each line.
    """

    def copy() -> None:
        with source:
            while line := source.readline(LONGEST_LINE):
                text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
                with _writing:
                    target.write(f"{prefix}{text}\n")
                    target.flush()

    thread = threading.Thread(target=copy, name=f"output {prefix}", daemon=True)
    thread.start()
    return thread
