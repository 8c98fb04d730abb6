"""Calls as tags with texts: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

A value is a text between line breaks. It may contain any tag, but as many `</parameter>` as `<parameter=...>` before
them, so that a call without one of these is a fault, and not a longer value. Imports no jax.
"""

import re
from dataclasses import replace

from groupax.data.tool_arguments import skip_space
from groupax.tools.calls import ParsedTurn, ToolCall
from groupax.tools.formats.reading import CUT_OFF, THINK, read_marked

OPENING, CLOSING = "<tool_call>", "</tool_call>"
MARKS = (OPENING, CLOSING, "</function>", "</parameter>", *THINK)
FUNCTION = re.compile(r"\s*+<function=([^>\n]*+)>")
PARAMETER = re.compile(r"\s*+<parameter=([^>\n]++)>\n?")
TAG = re.compile(r"<parameter=[^>\n]++>|\n?</parameter>")
END_OF_FUNCTION = "</function>"


def read(text: str, prompt: str) -> ParsedTurn:
    """Reads a turn; see `read_marked`."""
    return read_marked(text, prompt, OPENING, _read_call)


def _read_call(text: str, start: int) -> tuple[list[ToolCall], int]:
    call, end = _read_function(text, start + len(OPENING))
    close = skip_space(text, end)
    if not text.startswith(CLOSING, close):
        if not call.fault:
            call = replace(call, fault=f"text follows the call, before {CLOSING}")
        close = text.find(CLOSING, end)
    if close < 0:
        return [replace(call, fault=f"{CUT_OFF}: {CLOSING} is missing", text=text[start:])], len(text)
    close += len(CLOSING)
    return [replace(call, text=text[start:close])], close


def _read_function(text: str, start: int) -> tuple[ToolCall, int]:
    function = FUNCTION.match(text, start)
    if function is None or not function[1].strip():
        return ToolCall("", {}, "the call has no name of a tool: <function=name> is missing"), start
    name, arguments, pos = function[1].strip(), {}, function.end()
    while (parameter := PARAMETER.match(text, pos)) is not None:
        end = _end_of_value(text, parameter.end())
        key = parameter[1].strip()
        if end is None:
            return ToolCall(name, arguments, f"the parameter {key!r:.80} is not closed by </parameter>"), pos
        if key in arguments:
            return ToolCall(name, arguments, f"the parameter {key!r:.80} is repeated"), pos
        arguments[key] = text[parameter.end() : end.start()]
        pos = end.end()
    pos = skip_space(text, pos)
    if not text.startswith(END_OF_FUNCTION, pos):
        return ToolCall(
            name, arguments, f"{END_OF_FUNCTION} or <parameter=...> is missing before {text[pos : pos + 40]!r}"
        ), pos
    return ToolCall(name, arguments, is_text=True), pos + len(END_OF_FUNCTION)


def _end_of_value(text: str, start: int) -> re.Match[str] | None:
    """Returns the tag that closes the parameter whose value begins at a position; None if none does."""
    depth = 1
    for tag in TAG.finditer(text, start):
        depth += -1 if tag[0].endswith("</parameter>") else 1
        if depth == 0:
            return tag
    return None
