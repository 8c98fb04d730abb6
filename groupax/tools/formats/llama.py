"""A turn that is nothing but calls, as JSON: `{"name": ..., "parameters": {...}}`, separated by semicolons.

The mark `<|python_tag|>` may come first. Without it, JSON that has no name and parameters is content, as an answer can
be JSON too. Imports no jax.
"""

import re
from dataclasses import replace

from groupax.data.tool_arguments import read_json, skip_space
from groupax.tools.calls import ParsedTurn, ToolCall
from groupax.tools.formats.reading import MAX_CALLS, THINK, json_call, read_marked

TAG = "<|python_tag|>"
MARKS = (TAG, *THINK)
# The start of a call whose JSON is invalid, up to its parameters or to the end of the text
START_OF_CALL = re.compile(
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?+"name"\s*+:\s*+'
    r'"[^"]*+(?:\Z|"\s*+(?:\Z|,\s*+(?:\Z|"[a-z]*+(?:\Z|(?<=parameters)"|(?<=arguments)"))))'
)


def read(text: str, prompt: str) -> ParsedTurn:
    """Reads a turn: reasoning if there is any, then calls or content."""
    turn = read_marked(text, prompt, TAG, lambda text, start: (_read_calls(text, start, len(TAG)), len(text)))
    if turn.calls or not _begins_with_call(turn.content):
        return turn
    return replace(turn, content="", calls=tuple(_read_calls(turn.content, 0, 0)))


def _begins_with_call(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        value, _ = read_json(text)
    except ValueError:
        return START_OF_CALL.match(text) is not None
    return isinstance(value.get("name"), str) and not value.keys().isdisjoint({"parameters", "arguments"})


def _read_calls(text: str, start: int, tag: int) -> list[ToolCall]:
    """Reads the calls from `start`, where a tag of this length stands, to the end of the text."""
    pos, calls = start + tag, []
    while True:
        call, end = json_call(text, pos)
        after = skip_space(text, end)
        if end == pos or not text.startswith(";", after) or len(calls) == MAX_CALLS:
            break
        calls.append(replace(call, text=text[start:end]))
        start = pos = after + 1
        if skip_space(text, pos) == len(text):
            return calls
    if end > pos and after < len(text) and not call.fault:
        call = replace(call, fault=f"text follows the JSON of the call: {text[after : after + 40]!r}")
    return [*calls, replace(call, text=text[start:])]
