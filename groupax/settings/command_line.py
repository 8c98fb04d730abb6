"""Parses the arguments of a command into its options."""

import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields, make_dataclass
from typing import Annotated, Any, get_type_hints

import tyro

from groupax.settings.brief_help import all_options, brief_help
from groupax.settings.documentation import descriptions, parts, title
from groupax.settings.fields import nearest
from groupax.settings.json_flags import JSON_FLAGS


def parsed(kind: Any, name: str, arguments: Sequence[str], default: Any = None) -> Any:
    """Returns an instance of a dataclass whose fields are the options of a command; prints the help if asked to.

    The fields of a record that is composed of others by inheritance are flags too, grouped by these others in the help.
    The help of a command with such a record lists what most runs set, that of a command with `TOPICS` what these name,
    and both list everything with `--help all`.

    Args:
        kind: The dataclass.
        name: Name of the command, e.g. "train".
        arguments: The arguments that follow it on the command line.
        default: An instance with the default values of the options; None takes the defaults of the fields.

    Raises:
        ValueError: There is no such flag; names the nearest one.
        SystemExit: The help, or an explanation of wrong values, was printed.
    """
    help_flag = next((index for index, each in enumerate(arguments) if each in ("-h", "--help")), None)
    composed = {name: hint for name, hint in get_type_hints(kind).items() if len(parts(hint)) > 1}
    wants_all = help_flag is not None and list(arguments[help_flag + 1 : help_flag + 2]) == ["all"]
    if help_flag is not None and not wants_all and (composed or hasattr(kind, "TOPICS")):
        made = kind() if composed and default is None else kind
        print(brief_help(made if default is None else default, name), end="")
        raise SystemExit(0)
    listed = f"(groupax {name.removesuffix(' RUN_DIR')} --help all lists them)"
    if help_flag is None:
        _check_names(kind, arguments, listed)
    grouped = _grouped(kind, composed) if composed else _described(kind)
    if default is not None:
        own = {each.name: getattr(default, each.name) for each in fields(kind)}
        default = grouped(**own | {name: _split(own[name], hint) for name, hint in composed.items()})
    command, surplus = tyro.cli(
        grouped,
        prog=f"groupax {name}",
        args=list(arguments) if help_flag is None else ["--help"],
        default=default,
        use_underscores=True,
        registry=JSON_FLAGS,
        config=(tyro.conf.PositionalMetavarFromFieldName, tyro.conf.OmitArgPrefixes),
        return_unknown_args=True,
    )
    if surplus:
        raise ValueError(f"unexpected arguments: {shlex.join(surplus)} {listed}")
    if not composed:
        return command
    own = {each.name: getattr(command, each.name) for each in fields(kind)}
    return kind(**own | {name: _united(own[name], hint) for name, hint in composed.items()})


def _check_names(kind: Any, arguments: Sequence[str], listed: str) -> None:
    """Refuses flags that a command does not have; `listed` says where there is a list of those that it has."""
    found = [(option.name.rstrip("_"), option.kind) for option in all_options(kind) if not option.is_positional]
    known = {name for name, _ in found} | {f"no_{name}" for name, value in found if value is bool}
    given = [each.partition("=")[0] for each in arguments if re.match(r"--[A-Za-z]", each)]
    names = {flag: flag[2:].replace("-", "_") for flag in given}
    wrong = [
        f"there is no flag {flag}{nearest(name, known, '--') or ';'}"
        for flag, name in names.items()
        if name not in known and not name.startswith("tyro_")  # tyro's own flags, which write completions for shells
    ]
    if wrong:
        raise ValueError(f"{' '.join(wrong).removesuffix(';')} {listed}")


@functools.cache
def _groups(record: type) -> type:
    """Returns the dataclass that has the parts of a composed record as its fields."""
    groups = [(title(part), _described(part), field(default_factory=_described(part))) for part in parts(record)]
    return make_dataclass(f"{record.__name__}Groups", groups, frozen=True, kw_only=True)


@functools.cache
def _described(record: Any) -> Any:
    """Returns a subclass whose fields have their descriptions as annotations, in which lines do not end early."""
    hints, texts = get_type_hints(record, include_extras=True), descriptions(record)
    described = [
        (each.name, Annotated[hints[each.name], tyro.conf.arg(help=texts[each.name])], _like(each))
        for each in fields(record)
        if each.name in texts and not getattr(hints[each.name], "__metadata__", ())
    ]
    made = make_dataclass(record.__name__, described, bases=(record,), frozen=True, kw_only=True)
    made.__doc__ = record.__doc__
    return made


def _like(each: Field[Any]) -> Any:
    if each.default_factory is not MISSING:
        return field(default_factory=each.default_factory)
    return field(default=each.default)


def _grouped(kind: Any, composed: dict[str, Any]) -> Any:
    """Returns the dataclass with the composed records cut into their parts."""
    groups = [
        (name, Annotated[_groups(hint), tyro.conf.arg(name="")], field(default_factory=_groups(hint)))
        for name, hint in composed.items()
    ]
    grouped = make_dataclass(kind.__name__, groups, bases=(_described(kind),), frozen=True, kw_only=True)
    grouped.__doc__ = kind.__doc__
    return grouped


def _split(record: Any, composed: type) -> Any:
    """Returns the values of a composed record by part."""
    values = {
        title(part): _described(part)(**{each.name: getattr(record, each.name) for each in fields(part)})
        for part in parts(composed)
    }
    return _groups(composed)(**values)


def _united(groups: Any, composed: type) -> Any:
    """Returns a composed record with the values of its parts."""
    parts = [getattr(groups, each.name) for each in fields(groups)]
    return composed(**{each.name: getattr(part, each.name) for part in parts for each in fields(part)})
