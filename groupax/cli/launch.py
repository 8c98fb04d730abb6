"""The command `groupax launch`. Each launcher imports what it needs."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from groupax.core.settings.command_line import parsed
from groupax.core.settings.fields import nearest
from groupax.satellites.launch.local import Retries, Stop, local_attempt, run_with_retries
from groupax.satellites.launch.program import program_of, split_argv

USAGE = "groupax launch local | slurm [options] -- train ... (or resume, eval, or any program)"


@dataclass(frozen=True, kw_only=True)
class Local(Retries):
    """Run a program as several processes on this machine: groupax launch local -n 2 -- train ..."""

    num_processes: Annotated[int, "-n"]
    """Number of processes."""


def launch(arguments: Sequence[str]) -> int | None:
    """Runs `groupax launch` and returns the exit status of the program."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: {USAGE}\n       groupax launch local --help lists the options of that launcher")
        return 0 if arguments else 2
    if arguments[0] not in LAUNCHERS:
        raise ValueError(f"there is no launcher {arguments[0]!r}; {USAGE}{nearest(arguments[0], LAUNCHERS)}")
    own, argv = split_argv(arguments[1:], USAGE)
    return LAUNCHERS[arguments[0]](own, argv)


def local(arguments: Sequence[str], argv: Sequence[str]) -> int:
    """Runs `groupax launch local`."""
    command = parsed(Local, "launch local", arguments)
    if command.num_processes < 1:
        raise ValueError(f"-n must be at least 1, got {command.num_processes}")

    program = program_of(argv)
    with Stop() as stop:
        outcome = run_with_retries(
            lambda: local_attempt(program, command.num_processes, stop, command.grace_s),
            command,
            log,
            stop.pause,
        )
    if outcome.ending in ("mistake", "stopped"):
        log(outcome.why)
    return outcome.status


def slurm(arguments: Sequence[str], argv: Sequence[str]) -> int:
    """Runs `groupax launch slurm`."""
    from groupax.satellites.launch.slurm import Slurm, script_of, submit, write_script

    command = parsed(Slurm, "launch slurm", arguments)
    script, file = script_of(command, argv), command.file or Path(f"{command.job_name}.sbatch")
    is_refused = file.exists() and not command.force  # which is no reason to wait for a dry run
    if argv[0] == "train" and not command.skip_check and not is_refused:
        from groupax.cli.train import train

        os.environ["JAX_PLATFORMS"] = "cpu"  # this machine's accelerators are not those of the job
        train([*argv[1:], "--dry_run"])
    write_script(script, file, force=command.force)
    if command.dry_run:
        print(f"wrote {file}; to submit it: sbatch {file}")
    else:
        print(submit(file))
    return 0


def log(text: str) -> None:
    """Prints a line of the launcher, in addition to those of the processes."""
    print(f"groupax launch: {text}", file=sys.stderr, flush=True)


LAUNCHERS: dict[str, Callable[[Sequence[str], Sequence[str]], int]] = {"local": local, "slurm": slurm}
