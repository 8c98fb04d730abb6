"""The command line: options of a command are the fields of a dataclass, and their help the docstrings below these."""

import ast
import functools
import inspect
import itertools
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from groupax.core.settings.fields import check_type, choices_of, from_texts, is_open, kinds_of, nearest, takes_many

# What most runs set, by topic; `--help all` and the reference in the documentation have the other settings.
COMMON = {
    "Run": ("output_dir", "num_train_epochs", "max_steps"),
    "Rollouts": ("prompts_per_step", "num_generations", "max_completion_length", "temperature"),
    "Learning": ("batch_size", "max_length", "learning_rate", "beta", "lora_r"),
    "Evaluation and logging": ("eval_steps", "report_to"),
}
METAVARS = {"reward_funcs": "FUNCTION", "report_to": "TRACKER", "eval_dataset": "SOURCE", "dataset": "SOURCE"}
INDENT = 26

_FLAG = re.compile(r"--[A-Za-z]")
_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)[.:;]\s+(?=[A-Z0-9\"(])")
T = TypeVar("T")


Positional = Annotated[T, "positional"]  # an option that is given without its name; other texts are short forms


@dataclass(frozen=True)
class Option:
    """An option of a command."""

    name: str  # the name, without dashes
    kind: Any  # its type
    value: Any  # its default; `MISSING` if it has none
    text: str  # what it does, in one line
    alias: str = ""  # its short form, e.g. -n; "positional" if it is given without its name

    @property
    def is_positional(self) -> bool:
        """True if it is given without its name."""
        return self.alias == "positional"


def parsed(kind: type[T], name: str, arguments: Sequence[str], default: T | None = None) -> T:
    """Returns an instance of a dataclass whose fields are the options of a command; prints the help if asked to.

    The fields of a record among them are options too. The help of a command with a field `args` of settings lists what
    most runs set, and everything with `--help all`.

    Args:
        kind: The dataclass.
        name: Name of the command, e.g. "train".
        arguments: The arguments that follow it on the command line.
        default: An instance with the default values of the options; None takes the defaults of the fields.
    """
    asked = next((index for index, each in enumerate(arguments) if each in ("-h", "--help")), None)
    shown = kind if default is None else default
    if asked is not None:
        print(help_text(shown, name, is_whole=list(arguments[asked + 1 : asked + 2]) == ["all"]), end="")
        raise SystemExit(0)
    known = {option.name: option for option in all_options(shown)}
    given = _given(known, arguments, f"(groupax {name.removesuffix(' RUN_DIR')} --help all lists them)")
    for option in known.values():
        if option.value is MISSING and option.name not in given:
            if not (option.is_positional and takes_many(option.kind)):
                raise ValueError(f"{_written(option)} is missing; give it: {_usage(shown, name)}")
            given[option.name] = ()
    return _made(kind, default, given)


def _given(known: Mapping[str, Option], arguments: Sequence[str], listed: str) -> dict[str, Any]:
    """Returns the values of the options that are given; `listed` says where there is a list of options."""
    aliases = {option.alias: f"--{name}" for name, option in known.items() if option.alias[:1] == "-"}
    switches = {f"no_{name}" for name, option in known.items() if bool in kinds_of(option.kind)}
    texts: dict[str, list[str]] = {}
    unknown, alone, words = [], [], [aliases.get(word, word) for word in arguments]
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        if not _FLAG.match(word):
            alone.append(word)
        elif name in known:
            is_value = (value if equals else "".join(words[:1])).lower() in ("true", "false", "yes", "no", "1", "0")
            if known[name].kind is bool and (equals or is_value):
                raise ValueError(
                    f"--{name} takes no value: write --{name} to switch it on, --no_{name} to switch it off"
                )
            texts[name] = [value] if equals else _taken(words, known[name].kind)
            if not texts[name] and not takes_many(known[name].kind) and f"no_{name}" not in switches:
                raise ValueError(f"--{name} needs a value")
        elif name in switches:
            texts[name.removeprefix("no_")] = ["false"]
        else:
            unknown.append(f"there is no flag {flag}{nearest(name, {*known, *switches}, '--') or ';'}")
    if unknown:
        raise ValueError(f"{' '.join(unknown).removesuffix(';')} {listed}")
    for name, option in known.items():
        if option.is_positional and name not in texts and alone:
            number = len(alone) if takes_many(option.kind) else 1
            texts[name], alone = alone[:number], alone[number:]
    if alone:
        raise ValueError(f"unexpected arguments: {shlex.join(alone)} {listed}")
    given = {}
    for name, found in texts.items():
        try:
            given[name] = from_texts(found, known[name].kind)
        except ValueError as error:
            raise ValueError(f"{_written(known[name])}: {error}") from error
        check_type(_written(known[name]), given[name], known[name].kind)
    return given


def _taken(words: list[str], kind: Any) -> list[str]:
    """Removes the words from the front that are the value of a flag of this type, and returns them."""
    is_many = takes_many(kind)
    end = next((index for index, word in enumerate(words) if _FLAG.match(word)), len(words))
    end = min(end, 0 if kind is bool else end if is_many else 1)
    if bool in kinds_of(kind) and not is_many and words and words[0].lower() not in ("true", "false", "none"):
        end = 0
    taken, words[:end] = words[:end], []
    return taken


def _made(kind: Any, default: Any, given: Mapping[str, Any]) -> Any:
    """Returns a record with the values that are given, and those of `default` or of its fields."""
    values = {}
    for each in fields(kind):
        name, inner = each.name.rstrip("_"), _unwrapped(each.type)
        if is_dataclass(inner):
            values[each.name] = _made(inner, None if default is None else getattr(default, each.name), given)
        elif name in given:
            values[each.name] = given[name]
        elif default is not None:
            values[each.name] = getattr(default, each.name)
    return kind(**values)


def options(record: Any) -> Iterator[Option]:
    """Yields the fields of a command or a record of settings, with its values or as a class, as options."""
    kind = record if isinstance(record, type) else type(record)
    texts = descriptions(kind)
    for each in fields(record):
        alias = next(iter(getattr(each.type, "__metadata__", ())), "")
        made = each.default_factory() if each.default_factory is not MISSING else each.default
        value = made if isinstance(record, type) else getattr(record, each.name)
        yield Option(each.name.rstrip("_"), _unwrapped(each.type), value, texts.get(each.name, ""), alias)


def all_options(command: Any) -> Iterator[Option]:
    """Yields the options of a command and those of the records among them."""
    for option in options(command):
        yield from options(option.value) if is_dataclass(option.kind) else (option,)


def _unwrapped(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


# -- the help


def common_options(command: Any) -> dict[str, list[Option]]:
    """Returns the options of a command by topic: those of its own, then the settings of `COMMON` in its `args`."""
    own = [option for option in options(command) if option.name != "args" and not option.is_positional]
    taken = {option.name for option in own}
    settings = {option.name: option for option in options(command.args) if option.name not in taken}
    topics = {topic: [settings[name] for name in names if name in settings] for topic, names in COMMON.items()}
    return {"Task": own} | {topic: found for topic, found in topics.items() if found}


def help_text(command: Any, name: str, is_whole: bool = False) -> str:
    """Returns the help of a command, an instance with its defaults or its class; `is_whole` describes all settings."""
    kind = command if isinstance(command, type) else type(command)
    command = kind() if command is kind and "args" in kind.__dataclass_fields__ else command
    width = min(shutil.get_terminal_size().columns, 110)
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    is_brief = not is_whole and hasattr(command, "args")
    topics = common_options(command) if is_brief else _all_topics(command)
    lines = [_usage(command, name), "", *textwrap.wrap(" ".join((kind.__doc__ or "").split()), width)]
    for topic, each in topics.items():
        lines += ["", f"{bold}{topic}{plain}"]
        lines += [line for option in each for line in _lines(option, width, is_brief)]
    if is_brief:
        more = f"groupax {name.partition(' ')[0]} --help all describes all {len(fields(command.args))} settings. Each"
        lines += ["", *textwrap.wrap(f"{more} is an option of the command line and a key of a --config file.", width)]
    return "\n".join(lines) + "\n"


def _all_topics(command: Any) -> dict[str, list[Option]]:
    """Returns all options by topic: the command's own, then those of each record, or of each part of the settings."""
    own = list(options(command))
    topics = {
        "Arguments": [option for option in own if option.is_positional],
        "Options": [option for option in own if not option.is_positional and not is_dataclass(option.kind)],
    }
    topics["Options"].append(Option("help", bool, False, "Print the help; with --help all that of every option."))
    for record in (option for option in own if is_dataclass(option.kind)):
        found = {option.name: option for option in options(record.value)}
        groups = parts(record.kind) if record.name == "args" else [record.kind]
        for group in groups:
            heading = (title(group) if record.name == "args" else record.name).replace("_", " ").capitalize()
            topics[heading] = [found.pop(each.name) for each in fields(group) if each.name in found]
    return {topic: each for topic, each in topics.items() if each}


def _usage(command: Any, name: str) -> str:
    places = [_written(option) for option in options(command) if option.is_positional]
    return " ".join([f"usage: groupax {name} [options]", *places])


def _written(option: Option) -> str:
    name = option.name.upper()
    if not option.is_positional:
        return f"--{option.name}"
    return f"{name} ..." if takes_many(option.kind) else name if option.value is MISSING else f"[{name}]"


def _lines(option: Option, width: int, is_brief: bool) -> list[str]:
    flag = f"  {_written(option)}"
    if not option.is_positional:
        alias = f", {option.alias}" * bool(option.alias)
        flag = f"{flag}{alias} {_metavar(option.name, option.kind)}".rstrip()
    default = f" ({shown})" if (shown := _default(option)) else ""
    text = _SENTENCE_END.split(option.text, maxsplit=1)[0].rstrip(".") if is_brief else option.text
    lines = textwrap.wrap(text + default, max(width - INDENT, 24)) or [""]
    first = flag if len(flag) > INDENT - 2 else flag.ljust(INDENT) + lines.pop(0)
    return [first, *(" " * INDENT + line for line in lines)]


def _metavar(name: str, kind: Any) -> str:
    kinds = [each for each in kinds_of(kind) if each is not type(None)]
    first = kinds[0]
    if first is bool:
        return "" if len(kinds) == 1 else f"[{{{','.join(choices_of(kind))}}} ...]"
    if get_origin(first) in (dict, Mapping):
        return "JSON" if get_origin(first) is dict else "KEY VALUE ..."
    if takes_many(first):
        return f"{_metavar(name if name in METAVARS else name.removesuffix('s'), get_args(first)[0])} ..."
    if get_origin(first) is Literal:
        return "{" + ",".join([*get_args(first), *["MODULE:FUNCTION"] * is_open(kind)]) + "}"
    return {int: "N", float: "X", Path: "PATH"}.get(first, METAVARS.get(name, name.rpartition("_")[2].upper()))


def _default(option: Option) -> str:
    value = option.value
    if value is MISSING:
        return "" if option.is_positional else "required"
    if value is True:
        return f"off with --no_{option.name}"
    if value in (None, (), {}) or value is False:
        return ""
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return f"default {f'{value:g}' if isinstance(value, float) else shown}"


# -- descriptions


@functools.cache
def descriptions(record: type) -> dict[str, str]:
    """Returns the descriptions of the fields of a dataclass, inherited ones included, each as one line."""
    found: dict[str, str] = {}
    for each in reversed(record.__mro__):
        if is_dataclass(each):
            found |= _class_descriptions(each.__module__).get(each.__qualname__, {})
    return {each.name: found[each.name] for each in fields(record) if each.name in found}


def parts(record: Any) -> list[type]:
    """Returns the dataclasses that a dataclass directly inherits, in the order of their fields."""
    return [base for base in reversed(record.__bases__) if "__dataclass_fields__" in vars(base)]


def title(part: type) -> str:
    """Returns "learning_rate" for LearningRateSettings."""
    return re.sub("(?<!^)(?=[A-Z])", "_", part.__name__.removesuffix("Settings")).lower()


@functools.cache
def _class_descriptions(module: str) -> dict[str, dict[str, str]]:
    """Returns the descriptions of the fields of the classes at the top of a module, by class."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        node.name: {
            first.target.id: " ".join(str(second.value.value).split())
            for first, second in itertools.pairwise(node.body)
            if isinstance(first, ast.AnnAssign)
            and isinstance(first.target, ast.Name)
            and isinstance(second, ast.Expr)
            and isinstance(second.value, ast.Constant)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
