"""Harmony: a turn is messages with channels, and a message with a recipient is a call. Imports no jax.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

The analysis is reasoning; the final channel and commentary without a recipient are content.
"""

import re

from groupax.data.tool_arguments import read_json, skip_space
from groupax.tools.calls import ParsedTurn, ToolCall
from groupax.tools.formats.reading import CUT_OFF, MAX_CALLS, named_call

CALL, MESSAGE, CHANNEL = "<|call|>", "<|message|>", "<|channel|>"
START = "<|start|>"
MARKS = (CALL, MESSAGE, CHANNEL, START, "<|end|>", "<|return|>", "<|constrain|>")
END = re.compile(r"<\|(?:end|return|call|start)\|>")
RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]++)")
NAMESPACE = "functions."


def read(text: str, prompt: str) -> ParsedTurn:  # noqa: ARG001 - the prompt opens no channel
    """Reads a turn that continues `<|start|>assistant`."""
    content, thoughts, calls = [], [], []
    pos = 0
    while pos < len(text):
        start, body = pos, text.find(MESSAGE, pos)
        header = text[start:] if body < 0 else text[start:body]
        is_header = CHANNEL in header or header.lstrip().startswith((START, f"to={NAMESPACE}"))
        recipient = RECIPIENT.search(header) if is_header else None
        if recipient is not None and recipient[1] != "assistant":
            call, pos = _read_call(text, start, recipient[1], body)
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


def _read_call(text: str, start: int, recipient: str, body: int) -> tuple[ToolCall, int]:
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
