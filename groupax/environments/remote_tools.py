"""Descriptions of tools that a server lists. Imports no jax."""

import json
import re
from collections.abc import Mapping
from typing import Any

from groupax.terminal.printable import printable, short_repr

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # what all chat templates and formats of calls can write
LONGEST_SCHEMA = 1 << 17


def remote_schema(source: str, name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Returns the schema of a server's tool in OpenAI's format.

    Args:
        source: Server in an error.
        name: Name of the tool.
        description: What the tool does; None for nothing.
        parameters: JSON schema of its arguments.

    Raises:
        ValueError: The name cannot be written in a call, or the schema is not one of an object, or very long.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"{source} has a tool with the name {short_repr(name)}; names of tools have up to 64 letters, digits, _, . "
            "and -"
        )
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ValueError(
            f"{source}: the arguments of {name!r} must have a schema of an object, {short_repr(parameters)}"
        )
    schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": printable(description) if isinstance(description, str) else "",
            "parameters": {"type": "object", "properties": {}, **parameters},
        },
    }
    size = len(json.dumps(schema))
    if size > LONGEST_SCHEMA:
        raise ValueError(
            f"{source}: the description of the tool {name!r} has {size:,} characters, {LONGEST_SCHEMA:,} fit"
        )
    return schema
