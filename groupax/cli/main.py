"""The command `groupax`. Each subcommand imports what it needs when it runs."""

import importlib
import io
import logging
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from groupax import __version__
from groupax.core.errors import PREEMPTED, PreemptedError, RunError, raised_outside
from groupax.core.settings.fields import nearest
from groupax.core.terminal.printable import printable
from groupax.recipes import RECIPES

_python_format = warnings.formatwarning
# Where each command is, which is imported when it runs, and what the help says of it.
COMMANDS = {
    "train": (
        "groupax.cli.train:train",
        f"train a model with --model, --dataset and --reward_funcs, or with --recipe ({', '.join(RECIPES)})",
    ),
    "init": (
        "groupax.cli.init:init",
        "write a YAML file with the settings of a run and their descriptions: groupax init [FILE]",
    ),
    "sft": ("groupax.cli.train:sft", "train a model on examples: groupax sft --model MODEL --dataset FILE_OR_FOLDER"),
    "eval": (
        "groupax.cli.evaluate:evaluate",
        "evaluate a model: groupax eval --model MODEL --recipe gsm8k --dataset FILE_OR_FOLDER",
    ),
    "compare": (
        "groupax.cli.evaluate:compare",
        "compare two evaluations on the same prompts: groupax compare BEFORE AFTER",
    ),
    "report": ("groupax.cli.models:report", "write a report of a run in Markdown: groupax report RUN_DIR"),
    "generate": ("groupax.cli.generate:generate", "sample completions from a model"),
    "serve": ("groupax.cli.serve:serve", "serve a model with OpenAI's API: groupax serve --model MODEL --port 8000"),
    "resume": (
        "groupax.cli.train:resume",
        "resume a run that was stopped: groupax resume RUN_DIR [options to override]",
    ),
    "replay": (
        "groupax.cli.replay:replay",
        "compute a step of a run again: groupax replay RUN_DIR --step N [--stage reward]",
    ),
    "bisect": (
        "groupax.cli.bisect:bisect",
        "find the step where a metric went wrong: groupax bisect RUN_DIR --until 'kl > 1'",
    ),
    "checkpoints": (
        "groupax.cli.models:checkpoints",
        "list, verify, delete or export a run's checkpoints: groupax checkpoints RUN_DIR [list | verify | ...]",
    ),
    "launch": (
        "groupax.cli.launch:launch",
        "start one program as several processes: groupax launch local | slurm [options] -- train ...",
    ),
    "view": ("groupax.cli.view:view", "show runs on a live local web page: groupax view RUN_DIR [RUN_DIR ...]"),
    "note": (
        "groupax.cli.models:note",
        "give a run a name, tags and notes: groupax note RUN_DIR --name NAME --tags TAG",
    ),
    "export": ("groupax.cli.view:export", "save a run as one HTML file to send: groupax export RUN_DIR -o run.html"),
    "plan": (
        "groupax.cli.plan:plan",
        "estimate memory and step time on other hardware: groupax plan --model MODEL --devices h100-8",
    ),
    "doctor": (
        "groupax.cli.doctor:doctor",
        "check this machine: versions, devices, kernels, first steps of a small model",
    ),
    "inspect": ("groupax.cli.models:inspect", "describe a model and its memory, or what an adapter trains"),
    "merge": ("groupax.cli.models:merge", "merge an adapter into its base"),
    "convert": ("groupax.cli.models:convert", "convert a model to another dtype"),
    "quantize": ("groupax.cli.models:quantize", "quantize a model to 4 bits"),
    "push": ("groupax.cli.models:push", "upload a model or an adapter to the Hugging Face hub"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Mistakes of the user are reported without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"groupax {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        hint = nearest(arguments[0], COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        print(f"groupax: there is no command {arguments[0]!r}{hint} (groupax --help explains them)", file=sys.stderr)
        return 2
    return exit_status(f"groupax {arguments[0]}", lambda: run_command(arguments[0], arguments[1:]))


def usage() -> str:
    """Returns the help of groupax: its commands."""
    commands = "".join(f"\n  {name:<11} {about}" for name, (_, about) in COMMANDS.items())
    return f"usage: groupax COMMAND [options]  (groupax COMMAND --help lists them), or groupax --version\n{commands}"


def run_command(name: str, arguments: Sequence[str]) -> object:
    """Runs the command of this name and returns what it returns."""
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)(arguments)


def exit_status(name: str, command: Callable[[], object]) -> int:
    """Runs a command and returns its exit status, or the number that it returns; reports errors in one line."""
    try:
        status = command()
    except PreemptedError as stopped:  # already reported, with what to do
        return PREEMPTED if stopped.code == PREEMPTED else 1
    except (ValueError, TypeError) as error:
        _report_to_other_processes(error)
        if error.__traceback__ and raised_outside(error):
            raise
        print(printable(f"{name}: {error}"), file=sys.stderr)
        return 2
    except RunError as error:
        _report_to_other_processes(error)
        print(printable(f"{name}: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: stopped by Ctrl-C", file=sys.stderr)
        return 130
    return status if isinstance(status, int) else 0


def _report_to_other_processes(error: Exception) -> None:
    processes = sys.modules.get("groupax.parallel.processes")  # if this process has not imported it, there are none
    if processes is not None:
        with suppress(RunError):
            processes.fail(error)


def entry_point() -> None:
    """Runs the console script, which finds modules in the current folder too, after installed ones."""
    sys.path.append(str(Path.cwd()))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escapes for characters that an old terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    sys.excepthook = _print_traceback
    warnings.formatwarning = _formatted_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Visible())
    try:
        status = main()
        print(end="", flush=True)
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):  # it is of another pipe
            raise
        # the program that the output was piped into has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be written
        status = 128 + signal.SIGPIPE
    sys.exit(status)


class _Visible(logging.Formatter):
    """A formatter for loggers without a handler; it escapes what a model may have written."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _formatted_warning(*warning: Any, **more: Any) -> str:
    return printable(_python_format(*warning, **more))


def _print_traceback(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Prints an uncaught exception as Python does, but escapes what a model may have written."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, frames))))
