"""Become a program that is asked to stop when the one that started it is gone.

python -m groupax.launch.child PARENT WORDS
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux


def words_of(command: list[str]) -> list[str]:
    """The words that start a command in such a way."""
    return [sys.executable, "-m", "groupax.launch.child", str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Never returns.

    Args:
        parent: process id of who started this.
        command: the program and its arguments.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # gone before that was set
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
