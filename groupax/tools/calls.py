"""Records of what a model writes in a turn. Imports no jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call that a model has written.

    Attributes:
        name: Name of the tool.
        arguments: Arguments by name.
        fault: Reason why the call must not be run, for the model to read; empty if there is none. With a fault, the
            name and the arguments are as far as they could be read.
        text: Part of the turn that the call was read from.
        is_text: Whether the arguments are texts since the format writes no types.
    """

    name: str
    arguments: Mapping[str, Any]
    fault: str = ""
    text: str = ""
    is_text: bool = False


@dataclass(frozen=True)
class ParsedTurn:
    """A turn, taken apart.

    Attributes:
        content: Text of the turn without its calls and without its reasoning.
        reasoning: Text of the turn's reasoning, in which nothing is a call.
        calls: Calls in the order of the text.
    """

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
