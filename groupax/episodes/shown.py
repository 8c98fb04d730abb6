"""Episodes as texts for people who read them on a terminal. Imports no jax."""

from collections.abc import Mapping, Sequence
from typing import Any

from groupax.types import Rollout


def shown_episode(rollout: Rollout) -> str:
    """Returns what the model wrote, line by line, with its calls and what it read; untrusted, so print it `printable`.

    An episode of one turn is its text. In others a call is written as "-> name {arguments}", and what a tool or an
    environment answered as "<- answer".
    """
    if not rollout.turns or rollout.messages is None:
        return rollout.text
    return "\n".join(line for message in rollout.messages for line in _lines(message)).strip()


def _lines(message: Mapping[str, Any]) -> Sequence[str]:
    text = str(message.get("content") or "")
    if message["role"] != "assistant":
        return [f"<- {text}"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [*([text] if text else ()), *(f"-> {call['name']} {_arguments(call['arguments'])}" for call in calls)]


def _arguments(arguments: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {value!r}" for name, value in arguments.items()) + "}"
