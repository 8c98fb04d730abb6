"""A program that receives SIGTERM when its launcher is gone.

`python -m groupax.satellites.launch.child PARENT_PID COMMAND`
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def child_argv(command: list[str]) -> list[str]:
    """Returns the argv that runs a command as such a program."""
    return [sys.executable, "-m", "groupax.satellites.launch.child", str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Replaces this process by the command; never returns.

    Args:
        parent: Process id of the launcher.
        command: The program and its arguments.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before that call
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
