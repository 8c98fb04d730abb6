"""OpenAI's responses: requests to /v1/responses as chats, and turns as items of its output. Imports no jax.

Nothing is stored: every request has its whole conversation in `input`.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupax.data.tokenizer import encode_texts
from groupax.serve.chat_fields import short
from groupax.serve.errors import ApiError
from groupax.serve.exchange import Completion, Exchange, NewTokens
from groupax.serve.protocols.incoming import EXTENSIONS, Incoming, parts_of, token_details
from groupax.serve.protocols.responses_input import conversation, format_fields, logprob_fields, tool_fields
from groupax.serve.requests import check_known, parse_json, request_of
from groupax.serve.token_logprobs import logprob_entries, tokens_of_text
from groupax.serve.turns import Call, Turn

SAME = {"model", "temperature", "top_p", "stream", "parallel_tool_calls"}
OWN = {
    *("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "include"),
    "top_logprobs",
}
IGNORED = {
    *("metadata", "store", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "stream_options", "context_management"),
}
# Fields that are not supported, and the values of them that request nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
ECHOED = (
    "instructions",
    "metadata",
    "max_output_tokens",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
    "user",
)


def parse(body: bytes) -> Incoming:
    """Returns the request in the body of a POST to /v1/responses.

    Raises:
        ApiError: the body is not a JSON object, or a field is missing, unknown, of another type, or not supported.
    """
    given = {name: value for name, value in parse_json(body).items() if value is not None}
    check_known(given, [*SAME, *OWN, *IGNORED, *UNSUPPORTED, *EXTENSIONS], "the request")
    for name in given.keys() & UNSUPPORTED.keys():
        if given[name] not in UNSUPPORTED[name]:
            message = f"{name}={short(given[name])} is not supported"
            message += (
                "; send the whole conversation as input" if name in ("conversation", "previous_response_id") else ""
            )
            raise ApiError(400, message, name, "unsupported_value")
    chat = {name: given[name] for name in given.keys() & (SAME | EXTENSIONS)}
    chat |= {"messages": conversation(given), **tool_fields(given), **format_fields(given.get("text", {}))}
    chat |= logprob_fields(given)
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    reasoning = given.get("reasoning", {})
    if not isinstance(reasoning, Mapping):
        raise ApiError(400, f"reasoning must be an object, got {short(reasoning)}", "reasoning")
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


class ResponseWriter:
    """Writes the response to a request as a response of OpenAI's (see `exchange.Writer`).

    Args:
        exchange: The request and what its response is made of.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._open: _Item | None = None
        self._output: list[dict[str, Any]] = []
        self._num_events = 0
        self._reasoning, self._finish_reason = "", None
        self._completion, self._num_reported = Completion(), 0  # all tokens, and those whose log-probs were sent

    def full(self, completions: list[Completion]) -> dict[str, Any]:
        """Returns the whole response."""
        turn = self._exchange.turn(0, completions[0])
        status = _status(turn.finish_reason)
        logprobs = self._logprobs(completions[0], turn.content, turn.reasoning)
        output = [_item(kind, value, _item_id(kind), status, logprobs) for kind, value in parts_of(turn)]
        output = output or [_item("content", "", _item_id("content"), status)]
        return self._response(status, output, completions[0], turn.reasoning)

    def first_events(self) -> list[dict[str, Any]]:
        """Returns the start of a streamed response."""
        response = self._response("in_progress", [], None, "")
        return [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]

    def events(self, delta: NewTokens, piece: Turn, completion: Completion) -> list[dict[str, Any]]:
        """Returns the events of new tokens."""
        del completion
        self._completion.add(delta)
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
        if kind != "call":
            shown["content"] = []
        events = [self._event("response.output_item.added", output_index=item.index, item=shown)]
        if kind != "call":
            place = {"item_id": item.id, "output_index": item.index, "content_index": 0}
            events.append(self._event("response.content_part.added", **place, part=_part(kind, "")))
        return events

    def _grown(self, value: str | Call) -> dict[str, Any]:
        """Returns the event of a part that is added to the open item."""
        item = self._open
        assert item is not None, "started"
        place = {"item_id": item.id, "output_index": item.index}
        if isinstance(value, Call):
            item.text = value.arguments
            self._output.append(_item("call", value, item.id, "completed"))
            return self._event("response.function_call_arguments.delta", **place, delta=value.arguments)
        item.text += value
        if item.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **place, content_index=0, delta=value)
        logprobs = self._new_logprobs(item.text)
        return self._event("response.output_text.delta", **place, content_index=0, delta=value, logprobs=logprobs)

    def _close(self, status: str) -> list[dict[str, Any]]:
        """Returns the end of the open item."""
        if self._open is None:
            return []
        item, self._open = self._open, None
        place = {"item_id": item.id, "output_index": item.index}
        if item.kind == "call":
            done = self._output[-1]
            kind, more = "response.function_call_arguments.done", {"name": done["name"], "arguments": item.text}
            events = [self._event(kind, **place, **more)]
        else:
            logprobs = self._logprobs(self._completion, item.text, self._reasoning) if item.kind == "content" else []
            place, done = {**place, "content_index": 0}, _item(item.kind, item.text, item.id, status, logprobs)
            self._output.append(done)
            if item.kind == "reasoning":
                events = [self._event("response.reasoning_text.done", **place, text=item.text)]
            else:
                events = [self._event("response.output_text.done", **place, text=item.text, logprobs=logprobs)]
            part = _part(item.kind, item.text, logprobs)
            events.append(self._event("response.content_part.done", **place, part=part))
        return [*events, self._event("response.output_item.done", output_index=item.index, item=done)]

    def _new_logprobs(self, text: str) -> list[dict[str, Any]]:
        """Returns the log-probs of new tokens of a message, whose text until now is given."""
        if self._exchange.request.logprobs is None:
            return []
        new = range(self._num_reported, len(self._completion.tokens))
        if not self._num_reported or self._finish_reason is not None:  # not each time, since all tokens are decoded
            own = self._positions(self._completion, text, self._reasoning)
            new = range(max(own.start, self._num_reported), own.stop)
        self._num_reported = max(self._num_reported, new.stop)
        return _entries(self._exchange, self._completion, new)

    def _logprobs(self, completion: Completion, text: str, reasoning: str) -> list[dict[str, Any]]:
        """Returns the log-probs of the tokens of a message, if the request wants them."""
        if self._exchange.request.logprobs is None:
            return []
        return _entries(self._exchange, completion, self._positions(completion, text, reasoning))

    def _positions(self, completion: Completion, text: str, reasoning: str) -> range:
        reader = self._exchange.reader
        assert reader is not None, "responses are chats"
        return tokens_of_text(reader.format.decode, completion.tokens, text, reasoning)

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
        return response | token_details(request, exchange.prompts[0], completion)

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
    return f"{ {'reasoning': 'rs', 'content': 'msg', 'call': 'fc'}[kind] }_{uuid.uuid4().hex}".replace(" ", "")


def _item(
    kind: str, value: str | Call, item_id: str, status: str, logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Returns an item of the output; the log-probs are those of a message."""
    if isinstance(value, Call):
        call = {"call_id": value.id, "name": value.name, "arguments": value.arguments}
        return {"type": "function_call", "id": item_id, **call, "status": status}
    if kind == "reasoning":
        return {"type": "reasoning", "id": item_id, "summary": [], "content": [_part(kind, value)], "status": status}
    content = [_part(kind, value, logprobs)]
    return {"type": "message", "id": item_id, "role": "assistant", "content": content, "status": status}


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _entries(exchange: Exchange, completion: Completion, positions: range) -> list[dict[str, Any]]:
    """Returns the log-probs of tokens as this protocol writes them: with bytes, though without a text they are none."""
    some = slice(positions.start, positions.stop)
    entries = logprob_entries(
        exchange, Completion(completion.tokens[some], completion.policy_logps[some], [], completion.alternatives[some])
    )
    for entry in entries:
        for each in (entry, *entry["top_logprobs"]):
            each["bytes"] = each["bytes"] or []
    return entries
