"""Anthropic's messages: requests to /v1/messages as chats, and turns as its messages. Imports no jax."""

import json
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from groupax.data.images import URL
from groupax.serve.chats import expect, is_text, text_of, tools_of
from groupax.serve.exchange import Completion, Delta, Exchange, parts_of
from groupax.serve.requests import Incoming, chat_fields, check_known, request_of
from groupax.serve.turns import Call, Turn
from groupax.serve.web import ApiError

SAME = {"model", "max_tokens", "temperature", "top_p", "top_k", "stream"}
OWN = {"messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "output_config"}
IGNORED = {"metadata", "service_tier", "cache_control", "context_management", "diagnostics", "speed"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ERROR_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
TEXT = ("text",)


def parse(body: bytes, counts_only: bool = False) -> Incoming:
    """Returns the request in the body of a POST to /v1/messages; one that only counts needs no `max_tokens`."""
    given, chat = chat_fields(body, SAME, [*OWN, *IGNORED])
    if "max_tokens" not in given and not counts_only:
        raise ApiError(400, "max_tokens is missing", "max_tokens")
    chat |= {"messages": _messages(given), **_tools(given), **_output(given)}
    if "stop_sequences" in given:
        chat["stop"] = given["stop_sequences"]
    if chat["messages"][-1]["role"] == "assistant" and not chat["messages"][-1].get("tool_calls"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return Incoming(request_of(chat, is_chat=True), hints=_hints(given))


def error_body(error: ApiError) -> dict[str, Any]:
    """Returns the JSON object of an error."""
    default = "api_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    message = error.body["error"]["message"]
    return {"type": "error", "error": {"type": ERROR_TYPES.get(HTTPStatus(error.status), default), "message": message}}


class MessageWriter:
    """Writes the response to a request as a message of Anthropic's (see `exchange.Writer`)."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._id = f"msg_{uuid.uuid4().hex}"
        self._open: str | None = None  # kind of the block that is being streamed
        self._num_blocks = 0
        self._end = Turn()

    def full(self, completions: list[Completion]) -> dict[str, Any]:
        """Returns the whole message."""
        turn = self._exchange.turn(0, completions[0])
        blocks = [_block(*part) for part in parts_of(turn) or [("content", "")]]
        reason, stop_string = _stop_reason(turn)
        message = self._message(blocks, len(completions[0].tokens))
        details = self._exchange.token_details(completions[0])
        return {**message, "stop_reason": reason, "stop_sequence": stop_string, **details}

    def first_events(self) -> list[dict[str, Any]]:
        """Returns the start of a streamed message."""
        return [{"type": "message_start", "message": self._message([], 0)}]

    def events(self, delta: Delta, piece: Turn, completion: Completion) -> list[dict[str, Any]]:
        """Returns the events of new tokens."""
        del delta, completion
        events = []
        for kind, value in parts_of(piece):
            if kind != self._open or kind == "call":
                events += [*self._close(), self._start(kind, value)]
            events.append({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": _delta(kind, value)})
        if piece.finish_reason is not None:
            self._end = piece
            events += self._close()
        return events

    def last_events(self, completions: list[Completion]) -> list[dict[str, Any]]:
        """Returns the end of a streamed message."""
        reason, stop_string = _stop_reason(self._end)
        details = self._exchange.token_details(completions[0])
        delta = {"stop_reason": reason, "stop_sequence": stop_string, **details}
        usage = {"output_tokens": len(completions[0].tokens)}
        return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def _message(self, blocks: list[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._exchange.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self._exchange.prompts[0]), "output_tokens": num_tokens},
        }

    def _start(self, kind: str, value: str | Call) -> dict[str, Any]:
        self._open, self._num_blocks = kind, self._num_blocks + 1
        if isinstance(value, Call):
            block: dict[str, Any] = {"type": "tool_use", "id": value.id, "name": value.name, "input": {}}
        else:
            block = _block(kind, "")
        return {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._num_blocks - 1}]


def _stop_reason(turn: Turn) -> tuple[str, str | None]:
    assert turn.finish_reason is not None, "finished"
    is_cut = turn.stop_string is not None and turn.finish_reason == "stop"
    return "stop_sequence" if is_cut else STOP_REASONS[turn.finish_reason], turn.stop_string if is_cut else None


def _block(kind: str, value: str | Call) -> dict[str, Any]:
    if isinstance(value, Call):
        return {"type": "tool_use", "id": value.id, "name": value.name, "input": json.loads(value.arguments)}
    if kind == "reasoning":
        return {"type": "thinking", "thinking": value, "signature": ""}
    return {"type": "text", "text": value}


def _delta(kind: str, value: str | Call) -> dict[str, Any]:
    if isinstance(value, Call):
        return {"type": "input_json_delta", "partial_json": value.arguments}
    if kind == "reasoning":
        return {"type": "thinking_delta", "thinking": value}
    return {"type": "text_delta", "text": value}


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the conversation of a request as messages of a chat."""
    found = given.get("messages")
    expect(isinstance(found, list) and found, "messages must be a list of at least one message", found)
    system = text_of(given.get("system", []), TEXT, "system", "\n\n")
    messages = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(found or ()):
        where = f"messages.{number}"
        role = message.get("role") if isinstance(message, Mapping) else None
        expect(role in ("user", "assistant"), f"{where}.role must be user or assistant", role)
        content = message.get("content")
        blocks: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
        is_sound = isinstance(blocks, list) and all(isinstance(block, Mapping) for block in blocks)
        expect(is_sound, f"{where}.content must be a text or a list of blocks", content)
        messages += (_user_messages if role == "user" else _assistant_message)(blocks, f"{where}.content")
    return messages


def _user_messages(blocks: list[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = text_of(block.get("content", ""), TEXT, f"{where} of a tool_result")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
            continue
        if block.get("type") == "image":
            part = {"type": "image_url", "image_url": {"url": _image_url(block, where)}}
        else:
            part = {"type": "text", "text": text_of([block], TEXT, where)}
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(part)
        else:
            messages.append({"role": "user", "content": [part]})
    return messages or [{"role": "user", "content": ""}]


def _image_url(block: Mapping[str, Any], where: str) -> str:
    """Returns the image of a block as a `data:` URL."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind in ("url", "file"):
        message = f"{where} has a source of type {kind}, and this server fetches none; send the image as base64"
        raise ApiError(400, message, "messages", "unsupported_value")
    given: Mapping[str, Any] = source if isinstance(source, Mapping) and kind == "base64" else {}
    if not all(isinstance(given.get(name), str) for name in ("media_type", "data")):
        raise ApiError(400, f"{where} must have a source with type base64, media_type and data", "messages")
    return f"{URL}{given['media_type']};base64,{given['data']}"


def _assistant_message(blocks: list[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    content, reasoning = [], []
    message: dict[str, Any] = {"role": "assistant"}
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking" and is_text(block.get("thinking")):
            reasoning.append(block["thinking"])
        elif kind == "tool_use" and is_text(block.get("name")) and isinstance(block.get("input"), Mapping):
            function = {"name": block["name"], "arguments": block["input"]}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            content.append(text_of([block], TEXT, where))
    thoughts = {"reasoning_content": "".join(reasoning)} if reasoning else {}
    return [{**message, "content": "".join(content), **thoughts}]


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat about tools."""
    choice, tools = given.get("tool_choice"), given.get("tools", [])
    own = "a tool of yours with an input_schema"
    fields: dict[str, Any] = {"tools": tools_of(tools, ("custom", None), own, "input_schema")}
    if choice is None:
        return fields
    kind: Any = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    else:
        is_known = is_text(kind) and kind in CHOICES
        expect(is_known, "tool_choice must have the type auto, any, tool or none", choice)
        fields["tool_choice"] = CHOICES[kind]
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _output(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the field of a chat about the format of the response."""
    config = given.get("output_config", {})
    expect(isinstance(config, Mapping), "output_config must be an object", config)
    check_known(config, ("effort", "format"), "output_config", "output_config")
    form = config.get("format")
    if form is None:
        return {}
    is_schema = isinstance(form, Mapping) and form.get("type") == "json_schema"
    expect(is_schema, "output_config.format must have the type json_schema", form)
    schema = {"name": "output", "schema": form.get("schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _hints(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments for chat templates that a request implies."""
    hints: dict[str, Any] = {}
    thinking = given.get("thinking")
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, Mapping) else None
        is_known = kind in ("enabled", "disabled", "adaptive")
        expect(is_known, "thinking must have the type enabled, disabled or adaptive", thinking)
        hints["enable_thinking"] = kind != "disabled"
    effort = given.get("output_config", {}).get("effort")
    return hints if effort is None else {**hints, "reasoning_effort": effort}
