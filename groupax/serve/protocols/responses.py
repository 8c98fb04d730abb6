"""OpenAI's responses: requests to /v1/responses as chats, and turns as items of its output. Imports no jax.

Nothing is stored: every request has its whole conversation in `input`.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupax.data.tokenizer import encode_texts
from groupax.serve.chats import expect, is_text, short, text_of, tools_of
from groupax.serve.exchange import Completion, Delta, Exchange, parts_of
from groupax.serve.requests import Incoming, chat_fields, check_known, request_of
from groupax.serve.turns import Call, Turn
from groupax.serve.web import ApiError

TEXTS = ("input_text", "output_text", "text")
SAME = {"model", "temperature", "top_p", "stream", "parallel_tool_calls"}
OWN = {
    *("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning"),
}
IGNORED = {
    *("metadata", "store", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "stream_options", "context_management"),
}
# Fields that are not supported, and the values of them that request nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "previous_response_id": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
ECHOED = (
    *("instructions", "metadata", "max_output_tokens", "reasoning", "text", "tool_choice", "tools", "truncation"),
    "user",
)


def _conversation(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the conversation of a request as messages of a chat."""
    items: Any = given.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    expect(isinstance(items, list) and items, "input must be a text or a list of at least one item", given.get("input"))
    messages: list[dict[str, Any]] = []
    if given.get("instructions") is not None:
        messages.append({"role": "system", "content": text_of(given["instructions"], TEXTS, "instructions")})
    for number, item in enumerate(items):
        expect(isinstance(item, Mapping), f"input.{number} must be an object", item)
        _add_item(messages, item, f"input.{number}")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Adds an item of the input to the messages: items of one turn are one message."""
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "function_call_output":
        content = text_of(item.get("output"), TEXTS, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "function_call" and is_text(item.get("name")) and is_text(item.get("arguments")):
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _open_turn(messages, True).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = text_of(parts, ("reasoning_text", "summary_text"), f"{where}.content", "\n")
        messages.append({"role": "assistant", "content": "", **({"reasoning_content": text} if text else {})})
    elif kind == "message" and item.get("role") == "assistant":
        _open_turn(messages, False)["content"] = text_of(item.get("content"), TEXTS, f"{where}.content")
    elif kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")})
    else:
        message = f"{where} must be a message, function_call, function_call_output or reasoning, got {short(item)}"
        raise ApiError(400, message, "input", "unsupported_value")


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Returns a content as one text, or as parts of a chat if some are images."""
    if not any(_is_image(part) for part in (content if isinstance(content, list) else ())):
        return text_of(content, TEXTS, where)
    parts: list[dict[str, Any]] = []
    for part in content:
        if not _is_image(part):
            parts.append({"type": "text", "text": text_of([part], TEXTS, where)})
        elif part.get("file_id") is not None or not isinstance(part.get("image_url"), str):
            message = f"{where} must have images as image_url, a data: URL, got {short(part)}; this server has no files"
            raise ApiError(400, message, "input", "unsupported_value")
        else:
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
    return parts


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "input_image"


def _open_turn(messages: list[dict[str, Any]], has_call: bool) -> dict[str, Any]:
    """Returns the assistant's message that an item belongs to, which is created if no such turn has begun."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not (has_call or not (last["content"] or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tool_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat about tools."""
    choice, tools = given.get("tool_choice"), given.get("tools", [])
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    fields = {"tools": tools_of(tools, ("function",), "a function of yours", "parameters")}
    return fields if choice is None else {**fields, "tool_choice": choice}


def _format_fields(text: Any) -> dict[str, Any]:
    """Returns the field of a chat about the format of the response."""
    is_sound = isinstance(text, Mapping) and isinstance(text.get("format", {}), Mapping | None)
    expect(is_sound, "text must be an object with a format", text)
    check_known(text, ("format", "verbosity"), "text", "text")
    form = text.get("format") or {"type": "text"}
    if form.get("type") != "json_schema":
        return {"response_format": dict(form)}
    schema = {key: value for key, value in form.items() if key != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def parse(body: bytes) -> Incoming:
    """Returns the request in the body of a POST to /v1/responses."""
    given, chat = chat_fields(body, SAME, [*OWN, *IGNORED, *UNSUPPORTED])
    for name in given.keys() & UNSUPPORTED.keys():
        if given[name] not in UNSUPPORTED[name]:
            hint = "; send the whole conversation as input" if name in ("conversation", "previous_response_id") else ""
            raise ApiError(400, f"{name}={short(given[name])} is not supported{hint}", name, "unsupported_value")
    chat |= {"messages": _conversation(given), **_tool_fields(given), **_format_fields(given.get("text", {}))}
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    reasoning = given.get("reasoning", {})
    expect(isinstance(reasoning, Mapping), "reasoning must be an object", reasoning)
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    return Incoming(request_of(chat, is_chat=True), {name: given[name] for name in ECHOED if name in given})


@dataclass
class _Item:
    """An item of the output while it is streamed."""

    kind: str
    id: str
    index: int
    text: str = ""
    call: Call | None = None

    @property
    def place(self) -> dict[str, Any]:
        """The fields of an event that say what grows."""
        part = {} if self.kind == "call" else {"content_index": 0}
        return {"item_id": self.id, "output_index": self.index, **part}


class ResponseWriter:
    """Writes the response to a request as a response of OpenAI's (see `exchange.Writer`)."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._open: _Item | None = None
        self._output: list[dict[str, Any]] = []
        self._num_events = 0
        self._reasoning, self._finish_reason = "", None

    def full(self, completions: list[Completion]) -> dict[str, Any]:
        """Returns the whole response."""
        turn = self._exchange.turn(0, completions[0])
        status = _status(turn.finish_reason)
        output = [_item(kind, value, _item_id(kind), status) for kind, value in parts_of(turn) or [("content", "")]]
        return self._response(status, output, completions[0], turn.reasoning)

    def first_events(self) -> list[dict[str, Any]]:
        """Returns the start of a streamed response."""
        response = self._response("in_progress", [], None, "")
        return [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]

    def events(self, delta: Delta, piece: Turn, completion: Completion) -> list[dict[str, Any]]:
        """Returns the events of new tokens."""
        del delta, completion
        events = []
        self._reasoning += piece.reasoning
        self._finish_reason = piece.finish_reason
        for kind, value in parts_of(piece):
            if self._open is None or self._open.kind != kind or kind == "call":
                events += [*self._close("completed"), *self._start(kind, value)]
            events.append(self._grown(value))
        if piece.finish_reason is not None:
            events += self._close(_status(piece.finish_reason))
        return events

    def last_events(self, completions: list[Completion]) -> list[dict[str, Any]]:
        """Returns the end of a streamed response."""
        status = _status(self._finish_reason)
        response = self._response(status, self._output, completions[0], self._reasoning)
        return [self._event(f"response.{status}", response=response)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _start(self, kind: str, value: str | Call) -> list[dict[str, Any]]:
        self._open = item = _Item(kind, _item_id(kind), len(self._output))
        empty = Call(value.id, value.name, "") if isinstance(value, Call) else ""
        shown = _item(kind, empty, item.id, "in_progress")
        if kind == "call":
            return [self._event("response.output_item.added", output_index=item.index, item=shown)]
        return [
            self._event("response.output_item.added", output_index=item.index, item={**shown, "content": []}),
            self._event("response.content_part.added", **item.place, part=_part(kind, "")),
        ]

    def _grown(self, value: str | Call) -> dict[str, Any]:
        """Returns the event of a part that is added to the open item."""
        item = self._open
        assert item is not None, "started"
        if isinstance(value, Call):
            item.call = value
            return self._event("response.function_call_arguments.delta", **item.place, delta=value.arguments)
        item.text += value
        if item.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **item.place, delta=value)
        return self._event("response.output_text.delta", **item.place, delta=value, logprobs=[])

    def _close(self, status: str) -> list[dict[str, Any]]:
        """Returns the end of the open item."""
        if self._open is None:
            return []
        item, self._open = self._open, None
        done = _item(item.kind, item.call or item.text, item.id, "completed" if item.call else status)
        self._output.append(done)
        if item.call is not None:
            more = {"name": item.call.name, "arguments": item.call.arguments}
            events = [self._event("response.function_call_arguments.done", **item.place, **more)]
        else:
            kind, more = ("output_text", {"logprobs": []}) if item.kind == "content" else ("reasoning_text", {})
            events = [
                self._event(f"response.{kind}.done", **item.place, text=item.text, **more),
                self._event("response.content_part.done", **item.place, part=_part(item.kind, item.text)),
            ]
        return [*events, self._event("response.output_item.done", output_index=item.index, item=done)]

    def _response(
        self, status: str, output: list[dict[str, Any]], completion: Completion | None, reasoning: str
    ) -> dict[str, Any]:
        exchange, request = self._exchange, self._exchange.request
        response = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": exchange.model,
            "output": output,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "previous_response_id": None,
            "tools": [],
            "tool_choice": "auto",
            "store": False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "temperature": request.temperature,
            "top_p": request.top_p,
            "parallel_tool_calls": getattr(request, "parallel_tool_calls", True),
            "reasoning": {"effort": None, "summary": None},
            "usage": None,
            "user": None,
            **exchange.wire,
        }
        if completion is None:
            return response
        response["completed_at"] = int(time.time()) if status == "completed" else None
        response["usage"] = self._usage(completion, reasoning)
        return response | exchange.token_details(completion)

    def _usage(self, completion: Completion, reasoning: str) -> dict[str, Any]:
        num_prompt, num = self._exchange.usage([completion])
        num_thoughts = 0
        if reasoning and self._exchange.reader is not None:
            tokenizer = self._exchange.reader.format.tokenizer
            num_thoughts = min(len(encode_texts(tokenizer, [reasoning], [True])[0]), num)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num,
            "output_tokens_details": {"reasoning_tokens": num_thoughts},
            "total_tokens": num_prompt + num,
        }


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _item_id(kind: str) -> str:
    prefix = {"reasoning": "rs", "content": "msg", "call": "fc"}[kind]
    return f"{prefix}_{uuid.uuid4().hex}"


def _item(kind: str, value: str | Call, item_id: str, status: str) -> dict[str, Any]:
    """Returns an item of the output."""
    if isinstance(value, Call):
        call = {"call_id": value.id, "name": value.name, "arguments": value.arguments}
        return {"type": "function_call", "id": item_id, **call, "status": status}
    head = {"type": "reasoning", "summary": []} if kind == "reasoning" else {"type": "message", "role": "assistant"}
    return {**head, "id": item_id, "content": [_part(kind, value)], "status": status}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
