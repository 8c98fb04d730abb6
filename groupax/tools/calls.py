"""Turns of a model: records of their parts, and messages in OpenAI's format. Imports no jax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupax.core.types import CallRecord


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


def answered_calls(message: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> tuple[CallRecord, ...]:
    """Returns the calls of an assistant's message that messages of tools answer."""
    results = {answer.get("tool_call_id"): answer for answer in answers if answer["role"] == "tool"}
    return tuple(
        CallRecord(
            call["function"]["name"], call["function"]["arguments"], str(results[call["id"]].get("content") or ""), 0.0
        )
        for call in message.get("tool_calls", ())
        if call["id"] in results
    )


def assistant_message(
    content: str, reasoning: str, calls: Sequence[tuple[str, Mapping[str, Any]]], num_calls: int
) -> dict[str, Any]:
    """Returns the assistant's message of a turn, whose calls are numbered from `num_calls`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        # nine letters and digits, which is all that some templates take for an id
        message["tool_calls"] = [
            {"type": "function", "id": f"call{number:05d}", "function": {"name": name, "arguments": dict(arguments)}}
            for number, (name, arguments) in enumerate(calls, num_calls)
        ]
    return message
