"""The turns of an episode with tools or an environment, as a chat."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groupax.view.rollouts import Step
from groupax.view.runs import NotFoundError

TURN_CHARACTERS = 8_000  # of a text of the model or the environment, until the full text is requested
RESULT_CHARACTERS = 4_000
COLUMNS = ("turns", "messages")
ADVANTAGES = "turn_advantages"


def episode_of(step: Step, row: int) -> list[dict[str, Any]] | None:
    """Returns the parts of an episode in their order: turns of the model with their calls, and other messages.

    None for a completion of a log without turns, or whose turns cannot be read. Long texts are cut, and their `cut` is
    the number of characters of the full text. A turn has the range of its tokens.
    """
    if any(name not in step.table.column_names for name in COLUMNS):
        return None
    advantages = step.table.column(ADVANTAGES)[row].as_py() if ADVANTAGES in step.table.column_names else None
    turns, messages = (_parsed(step.text(name, row)[0]) for name in COLUMNS)
    return parts_of(turns, messages, advantages)


def parts_of(turns: Any, messages: Any, advantages: Any = None) -> list[dict[str, Any]] | None:
    """Returns the parts of an episode (see `episode_of`) from its turns and messages as JSON has them.

    Args:
        turns: Its turns.
        messages: Its messages.
        advantages: Advantage of each turn, where turns have their own.
    """
    own = _mappings(turns)
    if isinstance(advantages, list) and len(advantages) == len(own):
        own = [{**turn, "advantage": advantage} for turn, advantage in zip(own, advantages, strict=True)]
    return list(_parts(own, _mappings(messages))) if own else None


def streams_of(step: Step, row: int) -> list[dict[str, Any]]:
    """Returns the further streams of tokens of an episode: the numbers of their turns and of tokens that count, parts.

    The parts are those of `episode_of`, after the messages that the model has read first.
    """
    if "branches" not in step.table.column_names:
        return []
    return [_stream(branch) for branch in _mappings(_parsed(step.text("branches", row)[0]))]


def _stream(branch: Mapping[str, Any]) -> dict[str, Any]:
    turns, messages, prompt = (_parsed(_text(branch.get(name))) for name in ("turns", "messages", "prompt"))
    mask = branch.get("mask")
    read = [
        {"role": f"{message.get('role')}, prompt", **_cut(_text(message.get("content")), TURN_CHARACTERS)}
        for message in _mappings(prompt)
    ]
    return {
        "num_turns": len(_mappings(turns)),
        "num_tokens": sum(map(bool, mask)) if isinstance(mask, list) else 0,
        "parts": [*read, *(parts_of(turns, messages) or ())],
    }


def full_result(step: Step, row: int, turn: int, call: int | None) -> str:
    """Returns the full result of a call, or without `call` the full text of a turn.

    Raises:
        NotFoundError: The episode has no such turn or call.
    """
    turns = _mappings(_parsed(step.text("turns", row)[0])) if "turns" in step.table.column_names else []
    found = turns[turn] if turn < len(turns) else None
    if found is not None and call is not None:
        calls = _mappings(found.get("calls"))
        found = calls[call] if call < len(calls) else None
    if found is None:
        raise NotFoundError(f"the episode has no turn {turn}" + ("" if call is None else f" with a call {call}"))
    return str(found.get("text" if call is None else "result", ""))


def _parts(turns: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the parts. Results of calls are those of the turns, since the last ones are in no message."""
    numbered = enumerate(turns)
    for message in messages or [{"role": "assistant"}] * len(turns):
        role = str(message.get("role"))
        if role == "assistant":
            number, turn = next(numbered, (None, None))
            if turn is not None:
                yield _turn(number, turn, message)
        elif role != "tool":
            yield {"role": role, **_cut(_text(message.get("content")), TURN_CHARACTERS)}


def _turn(number: int | None, turn: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "turn": number,
        "reasoning": _cut(_text(message.get("reasoning_content")), TURN_CHARACTERS)["text"],
        **_cut(_text(turn.get("text")), TURN_CHARACTERS),
        "start": _integer(turn.get("start")),
        "end": _integer(turn.get("end")),
        "reward": _number(turn.get("reward")),
        "rewards": _numbers(turn.get("rewards")),
        "advantage": _number(turn["advantage"]) if "advantage" in turn else None,
        "calls": [
            {
                "name": str(call.get("name")),
                "arguments": _cut(_text(call.get("arguments")), RESULT_CHARACTERS)["text"],
                **_cut(_text(call.get("result")), RESULT_CHARACTERS),
                "seconds": _number(call.get("seconds")),
                "is_error": bool(call.get("error")),
            }
            for call in _mappings(turn.get("calls"))
        ],
    }


def _cut(text: str, limit: int) -> dict[str, Any]:
    return {"text": text[:limit], "cut": len(text) if len(text) > limit else 0}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _parsed(text: str) -> Any:
    """Returns what a JSON text stands for; None if it is damaged."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _numbers(value: Any) -> dict[str, float]:
    return {str(name): _number(each) for name, each in value.items()} if isinstance(value, Mapping) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
