"""Parses the arguments of a command into its options."""

from collections.abc import Sequence
from typing import Any

import tyro

from groupax.settings.json_flags import JSON_FLAGS


def parsed(kind: Any, name: str, arguments: Sequence[str], default: Any = None) -> Any:
    """Returns an instance of a dataclass whose fields are the options of a command; prints the help if it is asked for.

    Args:
        kind: the dataclass.
        name: of the command, e.g. "train".
        arguments: what follows it on the command line.
        default: an instance whose values the options start from; by default the defaults of the fields.

    Raises:
        SystemExit: help was printed, or the arguments are wrong and an explanation was printed.
    """
    return tyro.cli(
        kind,
        prog=f"groupax {name}",
        args=list(arguments),
        default=default,
        use_underscores=True,
        registry=JSON_FLAGS,
        config=(tyro.conf.PositionalMetavarFromFieldName,),
    )
