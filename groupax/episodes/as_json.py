"""The turns and messages of an episode as JSON, for checkpoints and the rollout log. Imports no jax."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupax.types import Branch, CallRecord, Turn

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
        | ({} if branch.adapter is None else {"adapter": branch.adapter})
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
            adapter=branch.get("adapter"),
        )
        for branch in plain
    )


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else repr(value)
