"""Results of calls: values that tools return, as the texts that a model reads. Imports no jax."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupax.core.errors import InfrastructureError
from groupax.core.terminal.printable import short_repr
from groupax.tools.tool import Step

MIN_RESULT_BYTES = 64  # room for the note in a text that was cut
MAX_REWARD = 1e30  # whose square and the sums of it are finite


@dataclass(frozen=True)
class ToolResult:
    """The result of a call.

    Attributes:
        text: What the model reads: the result, or {'error': ...}.
        seconds: Duration of the call; 0 if it was not made.
        error: Reason why there is no result; empty if there is one.
        reward: Reward of a `Step`.
        done: Whether a `Step` ends the episode.
        is_infrastructure: Whether an `InfrastructureError` is the reason, so that the episode cannot continue.
    """

    text: str
    seconds: float
    error: str = ""
    reward: float | None = None
    done: bool = False
    is_infrastructure: bool = False


def as_step(returned: Any, max_bytes: int) -> Step:
    """Returns what a tool or an environment has returned as a checked step, whose observation is a text.

    A text stays as it is, None is empty, dicts and lists become JSON, anything else what `str` makes of it.
    """
    step = checked_step(returned)
    return Step(cut_middle(_as_text(step.observation), max_bytes), step.reward, step.done)


def checked_step(returned: Any) -> Step:
    """Returns what a tool or an environment has returned as a step with a checked reward and `done`."""
    step = returned if isinstance(returned, Step) else Step(returned)
    if not isinstance(step.done, bool | np.bool_):
        raise InfrastructureError(f"done of a Step must be True or False, got {short_repr(step.done)}")
    reward = None if step.reward is None else checked_reward(step.reward)
    return Step(step.observation, reward, bool(step.done))


def checked_reward(reward: Any) -> float:
    """Returns a reward of a tool or an environment as a number."""
    try:
        number = math.nan if isinstance(reward, str | bytes | bytearray) else float(reward)
    except Exception:  # noqa: BLE001 - of a value of the user's
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        raise InfrastructureError(
            f"a reward must be a finite number of at most {MAX_REWARD:g}, or None, got {short_repr(reward)}"
        )
    return number


def error_result(message: str, seconds: float, max_bytes: int, kind: str = "") -> ToolResult:
    """Returns the result of a call that failed."""
    message = _encodable(message)
    text = cut_middle(str({"error": message}), max_bytes)
    error = f"{kind}: {message}" if kind and kind != message else message
    return ToolResult(text, seconds, cut_middle(error, max_bytes))


def message_of(error: BaseException) -> str:
    """Returns the message of an exception, or its class if it has none or fails to write it."""
    try:
        return str(error) or type(error).__name__
    except BaseException:  # noqa: BLE001 - the exception is the tool's
        return type(error).__name__


def cut_middle(text: str, max_bytes: int) -> str:
    """Returns the text, or its start and end around a note of how many characters are left out."""
    if 4 * len(text) <= max_bytes or len(text.encode()) <= max_bytes:
        return text
    room = (max_bytes - len(_note(len(text)))) // 2
    start = text[:room].encode()[:room].decode(errors="ignore")
    end = text[-room:].encode()[-room:].decode(errors="ignore")
    return start + _note(len(text) - len(start) - len(end)) + end


def _note(num_characters: int) -> str:
    return f"\n[... {num_characters:,} characters left out ...]\n"


def _as_text(observation: Any) -> str:
    if observation is None:
        return ""
    if isinstance(observation, dict | list):
        try:
            return _encodable(json.dumps(observation, ensure_ascii=False))
        except TypeError:  # a value that JSON has no form for
            return _encodable(str(observation))
    return _encodable(str(observation))


def _encodable(text: str) -> str:
    """Returns the text with a question mark for each half of a surrogate pair, which no tokenizer takes."""
    return text.encode(errors="replace").decode()
