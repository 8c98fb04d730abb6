"""Parts of the readers of all formats: a turn split into reasoning, content and calls, and calls in JSON.

A turn is read from left to right, so a mark inside of a call's arguments is text, and a call inside of reasoning is not
a call. The time is linear in the length of the text: at most `MAX_CALLS` calls are read. Imports no jax.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from groupax.data.tool_arguments import read_json, skip_space
from groupax.tools.calls import ParsedTurn, ToolCall

MAX_CALLS = 128  # of a turn; what follows them is one more call, with a fault
CUT_OFF = "the turn ends inside of this call"
THINK = ("<think>", "</think>")

# Reads the calls that begin at a position of a text, and returns them with the position of their end.
CallReader = Callable[[str, int], tuple[list[ToolCall], int]]


def read_marked(
    text: str, prompt: str, opening: str, read_calls: CallReader, think: tuple[str, str] = THINK
) -> ParsedTurn:
    """Reads a turn in which a mark begins each call.

    Args:
        text: Text of the turn.
        prompt: Generation prompt that the turn continues, which may have opened the reasoning.
        opening: Mark at which calls begin.
        read_calls: Reads the calls at such a mark, the mark included.
        think: Marks around reasoning.
    """
    marks = re.compile("|".join(map(re.escape, (opening, think[0]))))
    content, thoughts, calls = [], [], []
    pos = _end_of_opened_reasoning(text, prompt, marks, think)
    if pos:
        thoughts.append(text[:pos].removesuffix(think[1]))
    while (mark := marks.search(text, pos)) is not None:
        content.append(text[pos : mark.start()])
        if mark[0] == think[0]:
            pos = _after(text, think[1], mark.end())
            thoughts.append(text[mark.end() : pos].removesuffix(think[1]))
        elif len(calls) < MAX_CALLS:
            found, pos = read_calls(text, mark.start())
            calls += found
        else:
            rest, pos = text[mark.start() :], len(text)
            calls.append(ToolCall("", {}, f"a turn may have at most {MAX_CALLS} calls", rest))
    content.append(text[pos:])
    reasoning = "\n".join(filter(None, map(str.strip, thoughts)))
    return ParsedTurn("".join(content).strip(), reasoning, tuple(calls))


def _end_of_opened_reasoning(text: str, prompt: str, marks: re.Pattern[str], think: tuple[str, str]) -> int:
    """Returns the end of the reasoning that was opened before the turn; 0 if there is none.

    It was if the prompt says so, or if the text closes it before it opens it.
    """
    opening, closing = think
    if prompt.rfind(opening) > prompt.rfind(closing):
        return _after(text, closing, 0)
    first = marks.search(text)
    close = text.find(closing, 0, len(text) if first is None else first.start())
    return 0 if close < 0 else close + len(closing)


def _after(text: str, mark: str, start: int) -> int:
    """Returns the position after the next such mark, or the end of the text."""
    found = text.find(mark, start)
    return len(text) if found < 0 else found + len(mark)


def without_ends(text: str, ends: Sequence[str]) -> str:
    """Returns the text without the stop tokens, and the white space between them, at its end."""
    stop, end = len(text), len(text)
    while end and (text[end - 1].isspace() or any(text.endswith(mark, 0, end) for mark in ends)):
        if text[end - 1].isspace():
            end -= 1
        else:
            end -= next(len(mark) for mark in ends if text.endswith(mark, 0, end))
            stop = end
    return text[:stop]


def json_call(text: str, start: int) -> tuple[ToolCall, int]:
    """Reads a call {"name": ..., "arguments": {...}}; "parameters" is another name of its arguments.

    Args:
        text: Text of the turn.
        start: Position at which the JSON begins.

    Returns:
        The call, which has no text yet, and the end of its JSON; `start` if that is not valid.
    """
    try:
        value, end = read_json(text, start)
    except ValueError as error:
        return ToolCall("", {}, f"the call is not valid JSON: {error}"), start
    return call_of(value), end


def call_of(value: Any) -> ToolCall:
    """Returns the call that a JSON value is, with a fault if it is none."""
    if not isinstance(value, dict):
        return ToolCall("", {}, f"the call must be a JSON object with a name and arguments, got {value!r:.80}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, f"the call has no name of a tool; it has the keys {', '.join(map(repr, value))[:200]}")
    return named_call(name, value.get("arguments", value.get("parameters", {})))


def named_call(name: str, arguments: Any) -> ToolCall:
    """Returns a call of a tool, with a fault if its arguments are not a JSON object, or the text of one."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    elif isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            value, end = read_json(arguments)
            arguments = value if skip_space(arguments, end) == len(arguments) else arguments
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f"the arguments must be a JSON object, got {arguments!r:.80}")
    return ToolCall(name, arguments)
