"""The help of commands with many settings: the options of the command and the settings that matter most."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from groupax.settings.documentation import descriptions, first_sentence

Topics = Mapping[str, Sequence[str]]  # names of options by topic

# What most runs set, by topic; `--help all` and the reference in the documentation have the other settings.
COMMON: Topics = {
    "Run": ("output_dir", "num_train_epochs", "max_steps"),
    "Rollouts": ("prompts_per_step", "num_generations", "max_completion_length", "temperature"),
    "Learning": ("batch_size", "max_length", "learning_rate", "beta", "lora_r"),
    "Evaluation and logging": ("eval_steps", "report_to"),
}
METAVARS = {"reward_funcs": "FUNCTION", "report_to": "TRACKER", "eval_dataset": "SOURCE", "dataset": "SOURCE"}
INDENT = 26


@dataclass(frozen=True)
class Option:
    """An option of a command as its help shows it.

    Attributes:
        name: The name, without dashes.
        kind: Its type.
        value: Its default.
        text: What it does, in one line.
        is_positional: Whether it is given without its name.
    """

    name: str
    kind: Any
    value: Any
    text: str
    is_positional: bool = False


def common_options(command: Any) -> dict[str, list[Option]]:
    """Returns the options of a command by topic: those of its own, then the settings of `COMMON` that it has.

    Args:
        command: The command with the defaults to show, a dataclass whose field `args` has the settings.
    """
    own = [option for option in options(command) if option.name != "args" and not option.is_positional]
    settings = {option.name: option for option in options(command.args)}
    topics = {
        topic: [settings[name] for name in names if name in settings and name not in {each.name for each in own}]
        for topic, names in COMMON.items()
    }
    return {"Task": own} | {topic: found for topic, found in topics.items() if found}


def chosen_options(command: Any) -> dict[str, list[Option]]:
    """Returns the options of a command that its `TOPICS` name, by topic; also those of the records that it has.

    Args:
        command: The command with the defaults to show, or its class.
    """
    found = {option.name: option for option in all_options(command)}
    return {topic: [found[name] for name in names] for topic, names in command.TOPICS.items()}


def brief_help(command: Any, name: str) -> str:
    """Returns the help of a command that has too many options for one screen.

    It has `TOPICS`, or a field `args` with settings.

    Args:
        command: The command with its defaults, or its class.
        name: Name of the command, e.g. "train".
    """
    kind = command if isinstance(command, type) else type(command)
    width = min(shutil.get_terminal_size().columns, 110)
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    lines = [f"usage: groupax {name} [options]", "", *textwrap.wrap(" ".join((kind.__doc__ or "").split()), width)]
    verb = name.partition(" ")[0]
    if hasattr(kind, "TOPICS"):
        topics = chosen_options(command)
        more = f"groupax {verb} --help all describes all {len(list(all_options(command)))} options."
    else:
        topics = common_options(command)
        more = (
            f"groupax {verb} --help all describes all {len(fields(command.args))} settings. Each is an option of the "
            "command line and a key of a --config file."
        )
    for topic, found in topics.items():
        lines += ["", f"{bold}{topic}{plain}"]
        lines += [line for option in found for line in _lines(option, width)]
    lines += ["", *textwrap.wrap(more, width)]
    return "\n".join(lines) + "\n"


def all_options(command: Any) -> Iterator[Option]:
    """Yields the options of a command and those of the records among them."""
    for option in options(command):
        if is_dataclass(option.kind):
            yield from options(option.kind if option.value is None else option.value)
        else:
            yield option


def options(record: Any) -> Iterator[Option]:
    """Yields the fields of a dataclass, such as a command or a record of settings, as options.

    Args:
        record: The record with its values, or its class with the defaults.
    """
    kind = record if isinstance(record, type) else type(record)
    texts, hints = descriptions(kind), get_type_hints(kind)
    annotated = get_type_hints(kind, include_extras=True)
    for each in fields(record):
        is_positional = tyro.conf.Positional in getattr(annotated[each.name], "__metadata__", ())
        made = each.default_factory() if isinstance(record, type) and each.default_factory is not MISSING else None
        value = getattr(record, each.name, made)
        yield Option(each.name, hints[each.name], value, texts.get(each.name, ""), is_positional)


def _lines(option: Option, width: int) -> Iterable[str]:
    flag = f"  --{option.name} {_metavar(option.name, option.kind)}".rstrip()
    default = f" (default {shown})" if (shown := _default(option.value)) else ""
    text = textwrap.wrap(first_sentence(option.text) + default, max(width - INDENT, 24))
    if len(flag) > INDENT - 2:
        return [flag, *(" " * INDENT + line for line in text)]
    return [flag.ljust(INDENT) + text[0], *(" " * INDENT + line for line in text[1:])]


def _metavar(name: str, kind: Any) -> str:
    kinds = [each for each in get_args(kind) if each is not type(None)] if type(None) in get_args(kind) else [kind]
    first = kinds[0]
    if first is bool:
        return ""
    if get_origin(first) is tuple:
        return f"{_metavar(name if name in METAVARS else name.removesuffix('s'), get_args(first)[0])} ..."
    if get_origin(first) is Literal:
        return "{" + ",".join(map(str, get_args(first))) + "}"
    return {int: "N", float: "X", Path: "PATH"}.get(first, METAVARS.get(name, name.rpartition("_")[2].upper()))


def _default(value: Any) -> str:
    if value in (None, (), {}) or isinstance(value, bool):
        return ""
    return (
        " ".join(map(str, value))
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
