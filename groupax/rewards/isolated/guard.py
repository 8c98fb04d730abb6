"""The trusted process of an interpreter's sandbox: it starts the interpreter and ends with it.

An interpreter with too many files is ended too. It has the standard streams of this process, and with them the
connection to the trainer.
"""

from __future__ import annotations

import os
import time

from groupax.rewards.isolated.start import BOOTSTRAP, apply_limits, take_over_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_FILES = 10_000  # in /tmp: empty files take memory that its size limit does not count
PAUSE_S = 0.05


def main(order: dict[str, Any]) -> None:
    """Starts the interpreter and waits for its end."""
    program, filled = os.pipe()
    os.write(filled, order["filter"])
    os.close(filled)
    actions = [
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, program, order["filter_descriptor"]),
    ]
    command = [*order["command"], "-c", BOOTSTRAP]
    os.posix_spawn(command[0], command, {"PATH": "/usr/bin:/bin"}, file_actions=actions)
    os.close(program)
    for descriptor in take_over_streams():
        os.close(descriptor)  # or the trainer would not notice that the interpreter has ended
    apply_limits(order)
    while not os.waitpid(-1, os.WNOHANG)[0]:
        disk = os.statvfs("/tmp")
        if disk.f_files - disk.f_ffree > MAX_FILES:
            break
        time.sleep(PAUSE_S)
    os._exit(0)
