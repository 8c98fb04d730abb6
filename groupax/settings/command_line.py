"""Parses the arguments of a command into its options."""

import functools
import re
from collections.abc import Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, get_type_hints

import tyro

from groupax.settings.json_flags import JSON_FLAGS


def parsed(kind: Any, name: str, arguments: Sequence[str], default: Any = None) -> Any:
    """Returns an instance of a dataclass whose fields are the options of a command; prints the help if asked to.

    The fields of a record that is composed of others by inheritance are flags too, grouped by these others in the help.

    Args:
        kind: The dataclass.
        name: Name of the command, e.g. "train".
        arguments: The arguments that follow it on the command line.
        default: An instance with the default values of the options; None takes the defaults of the fields.

    Raises:
        SystemExit: The help, or an explanation of wrong arguments, was printed.
    """
    composed = {name: hint for name, hint in get_type_hints(kind).items() if len(_parts(hint)) > 1}
    grouped = _grouped(kind, composed) if composed else kind
    if default is not None and composed:
        own = {each.name: getattr(default, each.name) for each in fields(kind)}
        default = grouped(**own | {name: _split(own[name], hint) for name, hint in composed.items()})
    command = tyro.cli(
        grouped,
        prog=f"groupax {name}",
        args=list(arguments),
        default=default,
        use_underscores=True,
        registry=JSON_FLAGS,
        config=(tyro.conf.PositionalMetavarFromFieldName, tyro.conf.OmitArgPrefixes),
    )
    if not composed:
        return command
    own = {each.name: getattr(command, each.name) for each in fields(kind)}
    return kind(**own | {name: _united(own[name], hint) for name, hint in composed.items()})


def _parts(record: Any) -> list[type]:
    """Returns the dataclasses that a dataclass directly inherits, in the order of their fields."""
    bases = record.__bases__ if isinstance(record, type) and is_dataclass(record) else ()
    return [base for base in reversed(bases) if is_dataclass(base)]


def _title(part: type) -> str:
    """Returns "learning_rate" for LearningRateSettings."""
    return re.sub("(?<!^)(?=[A-Z])", "_", part.__name__.removesuffix("Settings")).lower()


@functools.cache
def _groups(record: type) -> type:
    """Returns the dataclass that has the parts of a composed record as its fields."""
    groups = [(_title(part), part, field(default_factory=part)) for part in _parts(record)]
    return make_dataclass(f"{record.__name__}Groups", groups, frozen=True, kw_only=True)


def _grouped(kind: Any, composed: dict[str, Any]) -> Any:
    """Returns the dataclass with the composed records cut into their parts."""
    groups = [
        (name, Annotated[_groups(hint), tyro.conf.arg(name="")], field(default_factory=_groups(hint)))
        for name, hint in composed.items()
    ]
    grouped = make_dataclass(kind.__name__, groups, bases=(kind,), frozen=True, kw_only=True)
    grouped.__doc__ = kind.__doc__
    return grouped


def _split(record: Any, composed: type) -> Any:
    """Returns the values of a composed record by part."""
    values = {
        _title(part): part(**{each.name: getattr(record, each.name) for each in fields(part)})
        for part in _parts(composed)
    }
    return _groups(composed)(**values)


def _united(groups: Any, composed: type) -> Any:
    """Returns a composed record with the values of its parts."""
    parts = [getattr(groups, each.name) for each in fields(groups)]
    return composed(**{each.name: getattr(part, each.name) for part in parts for each in fields(part)})
