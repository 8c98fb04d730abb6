"""Calls after a mark: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}`.

The second form may have `[CALL_ID]...` before its arguments. Imports no jax.
"""

import re
from dataclasses import replace

from groupax.data.tool_arguments import read_json, skip_space
from groupax.tools.calls import ParsedTurn, ToolCall
from groupax.tools.formats.reading import CUT_OFF, MAX_CALLS, call_of, named_call, read_marked

OPENING = "[TOOL_CALLS]"
THINK = ("[THINK]", "[/THINK]")
MARKS = (OPENING, "[ARGS]", "[CALL_ID]", *THINK)
NAME = re.compile(r"\s*+([^\s\[{]++)\s*+(?:\[CALL_ID\][^\[]*+)?+\[ARGS\]")


def read(text: str, prompt: str) -> ParsedTurn:
    """Reads a turn; see `read_marked`."""
    return read_marked(text, prompt, OPENING, _read_calls, THINK)


def _read_calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    begin = start + len(OPENING)
    named = NAME.match(text, begin)
    name = "" if named is None else named[1]
    try:
        pos = begin if named is None else named.end()
        if not text.startswith(("{", "["), skip_space(text, pos)):
            raise ValueError(f"a list of calls, or name[ARGS] and a JSON object, must follow {OPENING}")
        value, end = read_json(text, pos)
    except ValueError as error:
        end = text.find(OPENING, begin)
        end = len(text) if end < 0 else end
        fault = CUT_OFF if not text[begin:end].strip() else f"the call cannot be read: {error}"
        return [ToolCall(name, {}, fault, text[start:end])], end
    whole = text[start:end]
    if named is not None:
        return [replace(named_call(name, value), text=whole)], end
    values = value if isinstance(value, list) else [value]
    if not values or len(values) > MAX_CALLS:
        return [ToolCall("", {}, f"a list of calls has 1 to {MAX_CALLS} of them, got {len(values)}", whole)], end
    return [replace(call_of(each), text=whole) for each in values], end
