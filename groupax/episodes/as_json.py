"""The turns and messages of an episode as JSON, for checkpoints and the rollout log. Imports no jax."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupax.types import CallRecord, Turn


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


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else repr(value)
