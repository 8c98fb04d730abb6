"""Calls as JSON between tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Imports no jax."""

from dataclasses import replace

from groupax.data.tool_arguments import skip_space
from groupax.tools.calls import ParsedTurn, ToolCall
from groupax.tools.formats.reading import CUT_OFF, THINK, json_call, read_marked

OPENING, CLOSING = "<tool_call>", "</tool_call>"
MARKS = (OPENING, CLOSING, *THINK)


def read(text: str, prompt: str) -> ParsedTurn:
    """Reads a turn; see `read_marked`."""
    return read_marked(text, prompt, OPENING, _read_call)


def _read_call(text: str, start: int) -> tuple[list[ToolCall], int]:
    call, end = json_call(text, start + len(OPENING))
    close = skip_space(text, end)
    if not text.startswith(CLOSING, close):
        if not call.fault:
            call = replace(call, fault=f"text follows the JSON of the call, before {CLOSING}")
        close = text.find(CLOSING, end)
    if close < 0:
        return [replace(call, fault=f"{CUT_OFF}: {CLOSING} is missing", text=text[start:])], len(text)
    close += len(CLOSING)
    return [replace(call, text=text[start:close])], close
