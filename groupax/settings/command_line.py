"""Parses the arguments of a command into its options."""

from collections.abc import Sequence
from typing import Any

import tyro

from groupax.settings.json_flags import JSON_FLAGS


def parsed(kind: Any, name: str, arguments: Sequence[str], default: Any = None) -> Any:
    """Returns an instance of a dataclass whose fields are the options of a command; prints the help if it is asked for.

    Args:
        kind: The dataclass.
        name: Name of the command, e.g. "train".
        arguments: Arguments after the name on the command line.
        default: An instance with the default values of the options; None takes the defaults of the fields.

    Raises:
        SystemExit: The help, or an explanation of wrong arguments, was printed.
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
