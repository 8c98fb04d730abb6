"""A program that is started as several processes: its argv, its environment, and when it is started again."""

import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

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


def free_port(host: str = "") -> int:
    """Returns an unused port of this machine."""
    with socket.socket() as bound:
        bound.bind((host, 0))
        return bound.getsockname()[1]


Ending = Literal["done", "stopped", "mistake", "failed", "preempted"]
# done        all processes finished
# stopped     a stop was requested
# mistake     of the user, which would be repeated
# failed      a process failed or was killed
# preempted   a process saved its state to be started again, or its machine was lost

Value = TypeVar("Value")


MAX_WAIT_S = 60.0  # longest pause before a restart


@dataclass(frozen=True, kw_only=True)
class Retries:
    """A budget of restarts, and command-line options of the launchers that have one."""

    restarts: int = 3
    """Maximum number of restarts after a process or host failed."""
    preemptions: int = 1000
    """Maximum number of restarts after one saved its state to be started again (status 75), or its host was lost."""
    backoff_s: float = 1.0
    """Seconds before the first restart; doubled with each restart, up to a minute."""
    grace_s: float = 60.0
    """Seconds that the other processes have to stop after one has failed, before they are killed."""

    def __post_init__(self) -> None:
        for name in ("restarts", "preemptions", "backoff_s", "grace_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")

    def wait_s(self, num_restarts: int) -> float:
        """Returns the pause after `num_restarts` restarts."""
        return min(self.backoff_s * 2.0 ** min(num_restarts, 60), MAX_WAIT_S)


@dataclass(frozen=True)
class Outcome(Generic[Value]):
    """The end of an attempt."""

    ending: Ending  # kind of end
    why: str  # description of what happened
    value: Value  # result of the attempt


def run_with_retries(
    attempt: Callable[[], Outcome[Value]],
    retries: Retries,
    log: Callable[[str], None],
    pause: Callable[[float], bool],
) -> Outcome[Value]:
    """Repeats an attempt while its outcome calls for it and the budget allows; returns the last outcome.

    Args:
        attempt: Starts the program and waits for its end.
        retries: The budget.
        log: Receives a line for each restart, and one when the budget is spent.
        pause: Waits for a number of seconds; returns False if a stop was requested meanwhile.
    """
    used = {"failed": 0, "preempted": 0}
    budget = {"failed": retries.restarts, "preempted": retries.preemptions}
    while True:
        outcome = attempt()
        kind = outcome.ending
        if kind not in used:
            return outcome
        if used[kind] >= budget[kind]:
            log(f"{outcome.why}; not restarted again after {budget[kind]} restarts" if budget[kind] else outcome.why)
            return outcome
        wait_s = retries.wait_s(sum(used.values()))
        used[kind] += 1
        log(f"{outcome.why}; restarting in {wait_s:g} s ({used[kind]} of at most {budget[kind]} times)")
        if not pause(wait_s):
            return Outcome("stopped", "a stop was requested during the pause before a restart", outcome.value)
