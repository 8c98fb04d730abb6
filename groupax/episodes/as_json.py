"""Episodes as JSON, for checkpoints and the rollout log, and as text, for terminals. Imports no jax."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupax.core.types import Branch, CallRecord, Rollout, Turn

DTYPES: dict[str, type] = {  # of the arrays of a branch
    "prompt_ids": np.int32,
    "completion_ids": np.int32,
    "policy_logps": np.float32,
    "sampler_logps": np.float32,
    "mask": bool,
}
MESSAGES = ("messages", "prompt")  # of a branch


def turns_as_json(turns: Sequence[Turn]) -> str:
    """Returns turns with their calls as one text; values that JSON does not know become their `repr`."""
    plain = [{**vars(turn), "calls": [vars(call) for call in turn.calls]} for turn in turns]
    return json.dumps(plain, default=_plain)


def turns_from_json(text: str) -> tuple[Turn, ...]:
    """Returns the turns that `turns_as_json` has written."""
    return tuple(
        Turn(**{**turn, "calls": tuple(CallRecord(**call) for call in turn["calls"])}) for turn in json.loads(text)
    )


def messages_as_json(messages: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Returns the messages of an episode as one text; None if it has none."""
    return None if messages is None else json.dumps([dict(message) for message in messages], default=_plain)


def messages_from_json(text: str | None) -> tuple[Mapping[str, Any], ...] | None:
    """Returns the messages that `messages_as_json` has written."""
    return None if text is None else tuple(json.loads(text))


def branches_as_json(branches: Sequence[Branch]) -> str | None:
    """Returns further streams of an episode as one text, in which numbers keep all their bits; None without any."""
    plain = [
        {name: getattr(branch, name).tolist() for name in DTYPES}
        | {"turns": turns_as_json(branch.turns)}
        | {name: messages_as_json(getattr(branch, name)) for name in MESSAGES}
        for branch in branches
    ]
    return json.dumps(plain) if plain else None


def branches_from_json(text: str | None) -> tuple[Branch, ...]:
    """Returns the streams that `branches_as_json` has written."""
    plain = [] if text is None else json.loads(text)
    return tuple(
        Branch(
            **{name: np.asarray(branch[name], kind) for name, kind in DTYPES.items()},
            turns=turns_from_json(branch.get("turns", "[]")),
            messages=messages_from_json(branch.get("messages")),
            prompt=messages_from_json(branch.get("prompt")),
        )
        for branch in plain
    )


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else repr(value)


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
    return [*([text] if text else ()), *(f"-> {call['name']} {_shown(call['arguments'])}" for call in calls)]


def _shown(arguments: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {value!r}" for name, value in arguments.items()) + "}"
