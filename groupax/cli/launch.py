"""The command `groupax launch`. Each launcher imports what it needs."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from groupax.launch.argv import program_of, split_words
from groupax.launch.retries import Outcome, Retries, attempted
from groupax.settings.command_line import parsed
from groupax.settings.fields import nearest

USAGE = "groupax launch local | slurm | ray [options] -- train ... (or resume, eval, or any program)"


@dataclass(frozen=True, kw_only=True)
class Local:
    """Start a program as several processes on this machine: groupax launch local -n 2 -- train ..."""

    num_processes: Annotated[int, tyro.conf.arg(aliases=["-n"])]
    """How many."""
    restarts: int = 3
    """Most times that all are started again after one failed."""
    preemptions: int = 1000
    """The same after one saved its state to be started again (status 75)."""
    backoff_s: float = 1.0
    """Before the first such start; doubled each further time, up to a minute."""
    grace_s: float = 60.0
    """When a process has failed the others are asked to stop, and killed after so long."""


def launch(arguments: Sequence[str]) -> int | None:
    """`groupax launch`: the exit status of what was started.

    Raises:
        ValueError: the launcher, an option or the program is not there.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: {USAGE}\n       groupax launch local --help lists the options of that one")
        return 0 if arguments else 2
    if arguments[0] not in LAUNCHERS:
        raise ValueError(f"there is no launcher {arguments[0]!r}{nearest(arguments[0], LAUNCHERS)}; {USAGE}")
    own, words = split_words(arguments[1:], USAGE)
    return LAUNCHERS[arguments[0]](own, words)


def local(arguments: Sequence[str], words: Sequence[str]) -> int:
    """`groupax launch local`."""
    command = parsed(Local, "launch local", arguments)
    if command.num_processes < 1:
        raise ValueError(f"-n must be at least 1, got {command.num_processes}")

    from groupax.launch.local import Stop, local_attempt

    program = program_of(words)
    retries = Retries(command.restarts, command.preemptions, command.backoff_s)
    with Stop() as stop:
        outcome: Outcome[int] = attempted(
            lambda: local_attempt(program, command.num_processes, stop, command.grace_s), retries, tell, stop.pause
        )
    if outcome.ending in ("mistake", "stopped"):
        tell(outcome.why)
    return outcome.value


def slurm(arguments: Sequence[str], words: Sequence[str]) -> int:
    """`groupax launch slurm`."""
    from groupax.launch.slurm import Slurm, script_of, submit, written

    command = parsed(Slurm, "launch slurm", arguments)
    file = written(script_of(command, words), command.file or Path(f"{command.job_name}.sbatch"))
    if command.dry_run:
        print(f"wrote {file}; to submit it: sbatch {file}")
    else:
        print(submit(file))
    return 0


def ray(arguments: Sequence[str], words: Sequence[str]) -> int:
    """`groupax launch ray`."""
    from groupax.launch.ray_program import Ray, launch_on_ray

    return launch_on_ray(parsed(Ray, "launch ray", arguments), words, tell)


def tell(text: str) -> None:
    """A line of the launcher itself, beside those of the processes."""
    print(f"groupax launch: {text}", file=sys.stderr, flush=True)


LAUNCHERS: dict[str, Callable[[Sequence[str], Sequence[str]], int]] = {"local": local, "slurm": slurm, "ray": ray}
