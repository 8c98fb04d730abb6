"""Readers of a turn's text, one for each format in which models write calls.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
qwen_xml  <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}, once for each call
llama     {"name": ..., "parameters": {...}}; ...    and nothing else in the turn, or behind <|python_tag|>
harmony   <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>, of gpt-oss

A turn is read from left to right, so a mark inside of a call's
arguments is text, and a call inside of reasoning is not a call. The time is linear in the length of the text: at most
`MAX_CALLS` calls are read. Imports no jax.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from groupax.data.tool_arguments import read_json, skip_space
from groupax.tools.calls import ParsedTurn, ToolCall

MAX_CALLS = 128  # of a turn; what follows them is one more call, with a fault
CUT_OFF = "the turn ends inside of this call"
THINK, MISTRAL_THINK = ("<think>", "</think>"), ("[THINK]", "[/THINK]")

OPENING, CLOSING = "<tool_call>", "</tool_call>"
HERMES_MARKS = (OPENING, CLOSING, *THINK)
XML_MARKS = (OPENING, CLOSING, "</function>", "</parameter>", *THINK)
FUNCTION = re.compile(r"\s*+<function=([^>\n]*+)>")
PARAMETER = re.compile(r"\s*+<parameter=([^>\n]++)>\n?")
TAG = re.compile(r"<parameter=[^>\n]++>|\n?</parameter>")
END_OF_FUNCTION = "</function>"

TOOL_CALLS = "[TOOL_CALLS]"
MISTRAL_MARKS = (TOOL_CALLS, "[ARGS]", "[CALL_ID]", *MISTRAL_THINK)
NAMED = re.compile(r"\s*+([^\s\[{]++)\s*+(?:\[CALL_ID\][^\[]*+)?+\[ARGS\]")

PYTHON_TAG = "<|python_tag|>"
LLAMA_MARKS = (PYTHON_TAG, *THINK)
# The start of a call whose JSON is invalid, up to its parameters or to the end of the text
START_OF_CALL = re.compile(
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?+"name"\s*+:\s*+'
    r'"[^"]*+(?:\Z|"\s*+(?:\Z|,\s*+(?:\Z|"[a-z]*+(?:\Z|(?<=parameters)"|(?<=arguments)"))))'
)

CALL, MESSAGE, CHANNEL = "<|call|>", "<|message|>", "<|channel|>"
START = "<|start|>"
HARMONY_MARKS = (CALL, MESSAGE, CHANNEL, START, "<|end|>", "<|return|>", "<|constrain|>")
END = re.compile(r"<\|(?:end|return|call|start)\|>")
RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]++)")
NAMESPACE = "functions."

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # of response templates

# Reads the calls that begin at a position of a text, and returns them with the position of their end.
CallReader = Callable[[str, int], tuple[list[ToolCall], int]]


def read_marked(
    text: str, prompt: str, opening: str, read_calls: CallReader, think: tuple[str, str] = THINK
) -> ParsedTurn:
    """Reads a turn in which a mark begins each call."""
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


def json_call(text: str, start: int) -> tuple[ToolCall, int]:
    """Reads a call {"name": ..., "arguments": {...}}; "parameters" is another name of its arguments.

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


# -- hermes and qwen_xml


def read_hermes(text: str, prompt: str) -> ParsedTurn:
    """Reads a turn whose calls are JSON between tags."""
    return read_marked(text, prompt, OPENING, lambda text, start: _tagged(text, start, json_call))


def read_xml(text: str, prompt: str) -> ParsedTurn:
    """Reads a turn whose calls are tags with texts.

    A value is a text between line breaks. It may contain any tag, but as many `</parameter>` as `<parameter=...>`
    before them, so that a call without one of these is a fault, and not a longer value.
    """
    return read_marked(text, prompt, OPENING, lambda text, start: _tagged(text, start, _xml_call))


def _tagged(
    text: str, start: int, read_inner: Callable[[str, int], tuple[ToolCall, int]]
) -> tuple[list[ToolCall], int]:
    """Reads a call between `<tool_call>`, which stands at `start`, and `</tool_call>`."""
    call, end = read_inner(text, start + len(OPENING))
    close = skip_space(text, end)
    if not text.startswith(CLOSING, close):
        call = replace(call, fault=call.fault or f"text follows the call, before {CLOSING}")
        close = text.find(CLOSING, end)
    if close < 0:
        return [replace(call, fault=f"{CUT_OFF}: {CLOSING} is missing", text=text[start:])], len(text)
    close += len(CLOSING)
    return [replace(call, text=text[start:close])], close


def _xml_call(text: str, start: int) -> tuple[ToolCall, int]:
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


# -- mistral


def read_mistral(text: str, prompt: str) -> ParsedTurn:
    """Reads a turn whose calls follow a mark, as a list, or each with its name before its arguments."""
    return read_marked(text, prompt, TOOL_CALLS, _mistral_calls, MISTRAL_THINK)


def _mistral_calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    begin = start + len(TOOL_CALLS)
    named = NAMED.match(text, begin)
    name = "" if named is None else named[1]
    try:
        pos = begin if named is None else named.end()
        if not text.startswith(("{", "["), skip_space(text, pos)):
            raise ValueError(f"a list of calls, or name[ARGS] and a JSON object, must follow {TOOL_CALLS}")
        value, end = read_json(text, pos)
    except ValueError as error:
        end = text.find(TOOL_CALLS, begin)
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


# -- llama


def read_llama(text: str, prompt: str) -> ParsedTurn:
    """Reads a turn that has calls, separated by semicolons, or content. JSON that is not a call is content."""
    turn = read_marked(
        text, prompt, PYTHON_TAG, lambda text, start: (_llama_calls(text, start, len(PYTHON_TAG)), len(text))
    )
    if turn.calls or not _begins_with_call(turn.content):
        return turn
    return replace(turn, content="", calls=tuple(_llama_calls(turn.content, 0, 0)))


def _begins_with_call(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        value, _ = read_json(text)
    except ValueError:
        return START_OF_CALL.match(text) is not None
    return isinstance(value.get("name"), str) and not value.keys().isdisjoint({"parameters", "arguments"})


def _llama_calls(text: str, start: int, tag: int) -> list[ToolCall]:
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


# -- harmony


def read_harmony(text: str, prompt: str) -> ParsedTurn:  # noqa: ARG001 - the prompt opens no channel
    """Reads a turn that continues `<|start|>assistant`: messages with channels.

    Those with a recipient are calls, the analysis is reasoning, the final channel and other commentary are content.
    """
    content, thoughts, calls = [], [], []
    pos = 0
    while pos < len(text):
        start, body = pos, text.find(MESSAGE, pos)
        header = text[start:] if body < 0 else text[start:body]
        is_header = CHANNEL in header or header.lstrip().startswith((START, f"to={NAMESPACE}"))
        recipient = RECIPIENT.search(header) if is_header else None
        if recipient is not None and recipient[1] != "assistant":
            call, pos = _harmony_call(text, start, recipient[1], body)
            calls.append(call)
            if len(calls) > MAX_CALLS:
                calls[-1] = ToolCall("", {}, f"a turn may have at most {MAX_CALLS} calls", text[start:])
                break
            continue
        if not is_header:
            content.append(header)
        if body < 0:
            break
        channel = header.rpartition(CHANNEL)[2].strip()
        begin = body + len(MESSAGE)
        end, pos = _end_of_message(text, begin)
        (thoughts if is_header and channel.startswith("analysis") else content).append(text[begin:end])
    join = "\n".join
    return ParsedTurn(
        join(filter(None, map(str.strip, content))), join(filter(None, map(str.strip, thoughts))), tuple(calls)
    )


def _end_of_message(text: str, begin: int) -> tuple[int, int]:
    """Returns where the body of a message ends, and where the next message begins."""
    end = END.search(text, begin)
    if end is None:
        return len(text), len(text)
    return end.start(), end.start() if end[0] == START else end.end()


def _harmony_call(text: str, start: int, recipient: str, body: int) -> tuple[ToolCall, int]:
    """Reads a message to a tool, whose body begins with a mark at `body`; -1 if it has none."""
    name = recipient.removeprefix(NAMESPACE)
    if body < 0:
        return ToolCall(name, {}, f"{CUT_OFF}: {MESSAGE} is missing", text[start:]), len(text)
    begin = body + len(MESSAGE)
    try:
        value, end = read_json(text, begin)
        call = named_call(name, value)
    except ValueError as error:
        end, call = begin, ToolCall(name, {}, f"the arguments are not valid JSON: {error}")
    after = skip_space(text, end)
    if end > begin and text.startswith(CALL, after):
        after += len(CALL)
        return ToolCall(name, call.arguments, call.fault, text[start:after]), after
    stop, after = _end_of_message(text, end)
    fault = call.fault or f"{CALL} must follow the JSON of the call, got {text[end : end + 40]!r}"
    fault = f"{CUT_OFF}: {CALL} is missing" if stop == len(text) else fault
    return ToolCall(name, call.arguments, fault, text[start:after]), after


# -- the tokenizer's own response template


def read_by_template(template: Mapping[str, Any], text: str, prompt: str) -> ParsedTurn:
    """Reads a turn by a response template. A turn that it cannot read is one call with a fault."""
    from transformers.utils.chat_parsing import ResponseParser

    try:
        parser = ResponseParser(dict(template), prefix=prompt)
        parser.feed(text)
        message, _ = parser.finalize()
        # the character shows that what precedes it is complete
        events = ResponseParser(dict(template), prefix=prompt).feed(text + "\0")
    except Exception as error:  # noqa: BLE001 - a template's patterns fail in many ways
        return ParsedTurn("", "", (ToolCall("", {}, f"the turn cannot be read: {error!r:.300}", text),))
    num_closed = sum(event["type"] == "region_close" and event["field"] == "tool_calls" for event in events)
    calls = [
        replace(call_of(each.get("function", each) if isinstance(each, dict) else each), text=str(each)[:1000])
        for each in message.get("tool_calls") or []
    ]
    calls[num_closed:] = [replace(call, fault=call.fault or CUT_OFF) for call in calls[num_closed:]]
    thoughts = [message[key] for key in REASONING_FIELDS if isinstance(message.get(key), str)]
    content = message.get("content")
    return ParsedTurn(content.strip() if isinstance(content, str) else "", "\n".join(thoughts).strip(), tuple(calls))
