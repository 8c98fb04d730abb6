"""A program that is started as several processes: its argv and its environment."""

import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from groupax.core.settings import environment as env
from groupax.core.settings.fields import nearest

# Commands of groupax that may run as several processes.
LAUNCHED = ("train", "resume", "eval")


def program_of(argv: Sequence[str]) -> list[str]:
    """Returns the program to run and its arguments."""
    if not argv:
        raise ValueError("no program to start; put it after --, as in: groupax launch local -n 2 -- train --model ...")
    if argv[0] in LAUNCHED:
        return [sys.executable, "-m", "groupax", *argv]
    if shutil.which(argv[0]) is None:
        raise ValueError(
            f"{argv[0]!r} is neither {', '.join(LAUNCHED)} nor an installed program{nearest(argv[0], LAUNCHED)}"
        )
    return list(argv)


def split_argv(arguments: Sequence[str], usage: str) -> tuple[list[str], list[str]]:
    """Returns the launcher's own arguments, and those after the first `--` without a leading `groupax`."""
    own = list(arguments)
    if "--" in own:
        index = own.index("--")
        return own[:index], _without_groupax(own[index + 1 :])
    if {"-h", "--help"} & set(own):
        return own, []
    raise ValueError(f"the program to start must follow --: {usage}")


def _without_groupax(argv: list[str]) -> list[str]:
    """Turns `groupax train ...`, and `python -m groupax train ...` with this Python, into `train ...`."""
    python = shutil.which(argv[0]) if argv else None
    is_own_python = python is not None and Path(python).parent == Path(sys.executable).parent
    first = 1 if argv[:1] == ["groupax"] else 3 if is_own_python and argv[1:3] == ["-m", "groupax"] else 0
    return argv[first:] if argv[first : first + 1] and argv[first] in LAUNCHED else argv


def option(argv: Sequence[str], name: str) -> str | None:
    """Returns the value of an option, given as --name VALUE or --name=VALUE; None if it is absent."""
    for index, word in enumerate(argv):
        if word == name and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
    return None


def process_environment(process_index: int, num_processes: int, coordinator: str) -> dict[str, str]:
    """Returns the variables of one process; process 0 waits for the others on the `coordinator`'s host:port."""
    return {
        env.COORDINATOR: coordinator,
        env.NUM_PROCESSES: str(num_processes),
        env.PROCESS_INDEX: str(process_index),
    }


def free_port(host: str) -> int:
    """Returns an unused port of this machine."""
    with socket.socket() as bound:
        bound.bind((host, 0))
        return bound.getsockname()[1]
