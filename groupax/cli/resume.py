"""`groupax resume`: the command that started a run, with which it continues."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.cli.options import LISTS, check_flags, flag_value, overlaid, read_yaml
from groupax.cli.sft import SFT, start_sft
from groupax.cli.train import Train, start
from groupax.config import SFTConfig, config_class
from groupax.events import Message
from groupax.runs.files import complete_run
from groupax.runs.progress.named import progress_named
from groupax.settings.command_line import parsed


@dataclass(frozen=True, kw_only=True)
class Resume(Train):
    """Continue a run that was stopped, with the command that started it. RUN_DIR is a run folder or URL, or one of its
    checkpoints. Options given here take precedence."""


def resume(arguments: Sequence[str]) -> None:
    """Runs `groupax resume`: the command that started the run, with `resume` set to it."""
    asks_help = bool({"-h", "--help"} & set(arguments))
    if not asks_help and (not arguments or arguments[0].startswith("-")):
        raise ValueError("which run? groupax resume RUN_DIR [options of groupax train or sft that should differ]")
    if asks_help:
        parsed(Resume, "resume RUN_DIR", arguments)
    options = list(arguments[1:])
    path = flag_value(options, "--config")
    default = resumed_command(arguments[0].rstrip("/"))
    check_flags(options, type(default.args))
    default = overlaid(default, read_yaml(path), path) if path else default
    command = parsed(type(default), "resume RUN_DIR", options, default)
    num_steps = num_steps_if_complete(command, default)
    if num_steps is not None:
        with progress_named(command.args.progress_bar) as progress:
            progress(Message(complete_run(command.args.output_dir, num_steps)))
        return
    start_sft(command) if isinstance(command, SFT) else start(command)


def resumed_command(run: str) -> Train | SFT:
    """Returns the command that started a run, changed to resume it.

    Raises:
        ValueError: there is no run, or it was not started by `groupax train` or `groupax sft`.
    """
    config = _run_file(run, "config.json")
    if config is None:
        raise ValueError(f"{run} is no run folder: it has no config.json")
    command = _run_file(run, "command.json")
    if command is None:
        raise ValueError(
            f"the run in {run} was started from Python; start that program again, which resumes it (resume='auto')"
        )
    return command_of(command, config, run)


def command_of(command: Mapping[str, Any], settings: Mapping[str, Any], run: str) -> Train | SFT:
    """Returns a recorded command, changed to resume the run.

    Args:
        command: Content of `command.json`.
        settings: Content of `config.json`.
        run: The run folder.
    """
    kind = config_class(settings)
    args: Any = kind.from_mapping({**settings, "output_dir": run, "resume": run})
    lists = {name: tuple(command[name]) for name in LISTS if command.get(name) is not None}
    return (SFT if kind is SFTConfig else Train)(**{**command, **lists}, args=args)


def num_steps_if_complete(command: Train | SFT, recorded: Train | SFT) -> int | None:
    """Returns the number of steps of a run that has taken them all and has its results, else None.

    It is also None if the number of steps is not known before the model and the data are loaded, which is so where
    options change and `max_steps` is not set, and for a run in a bucket.

    Args:
        command: The command that resumes the run.
        recorded: The command that the run was started with, changed to resume it.
    """
    from groupax.runs.checkpoints.choose import split_path
    from groupax.runs.checkpoints.store import LocalStore
    from groupax.storage.buckets import is_remote

    run, step = split_path(command.args.resume)
    if is_remote(run) or step is not None or not isinstance(about := _run_file(run, "run.json"), dict):
        return None
    processes = about.get("processes") or [{}]
    planned = processes[-1].get("num_steps") if command == recorded else None
    planned = command.args.max_steps if command.args.max_steps > 0 else planned
    steps = LocalStore(Path(run) / "checkpoints").steps()
    is_evaluated = isinstance(command, Train) and bool(command.eval_dataset or command.recipe)
    results = ("model", "result.json") if is_evaluated else ("model",)
    has_results = all((Path(run) / name).exists() for name in results)
    is_complete = isinstance(planned, int) and steps and steps[-1] >= planned and has_results
    return planned if is_complete else None


def _run_file(run: str, name: str) -> dict[str, Any] | None:
    from groupax.storage.buckets import RemoteFolder, is_remote
    from groupax.storage.folders import read_file

    try:
        text = RemoteFolder(run).read(name) if is_remote(run) else read_file(Path(run) / name)
        return json.loads(text)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{run}/{name} cannot be read: {error}") from error
