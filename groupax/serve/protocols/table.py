"""All protocols in which completions are requested, by their paths. Imports no jax."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from groupax.serve.errors import ApiError
from groupax.serve.exchange import Exchange, Writer
from groupax.serve.protocols import anthropic_messages, openai_responses
from groupax.serve.protocols.incoming import Incoming
from groupax.serve.requests import parse
from groupax.serve.responses import ResponseBuilder


@dataclass(frozen=True)
class Protocol:
    """A protocol.

    Attributes:
        parse: Returns the request in a body; raises `ApiError`.
        writer: Creates the writer of a response.
        error_body: Returns the JSON object of an error.
        error_event: Returns the event of an error that ends a stream.
        has_event_names: Whether streamed events have their type as their name. Otherwise "[DONE]" is the last one.
    """

    parse: Callable[[bytes], Incoming]
    writer: Callable[[Exchange], Writer]
    error_body: Callable[[ApiError], dict[str, Any]]
    error_event: Callable[[ApiError], dict[str, Any]]
    has_event_names: bool

    def encode_event(self, event: Mapping[str, Any]) -> bytes:
        """Returns a server-sent event."""
        name = f"event: {event['type']}\n" if self.has_event_names else ""
        return f"{name}data: {json.dumps(event)}\n\n".encode()

    @property
    def end(self) -> bytes:
        """The end of a stream without an error."""
        return b"" if self.has_event_names else b"data: [DONE]\n\n"


def _openai_error(error: ApiError) -> dict[str, Any]:
    return error.body


def _responses_error_event(error: ApiError) -> dict[str, Any]:
    return {**error.body["error"], **error.body, "type": "error", "sequence_number": 0}


def _openai(is_chat: bool) -> Protocol:
    return Protocol(lambda body: Incoming(parse(body, is_chat)), ResponseBuilder, _openai_error, _openai_error, False)


PROTOCOLS = {
    "/v1/completions": _openai(is_chat=False),
    "/v1/chat/completions": _openai(is_chat=True),
    "/v1/responses": Protocol(
        openai_responses.parse, openai_responses.ResponseWriter, _openai_error, _responses_error_event, True
    ),
    "/v1/messages": Protocol(
        anthropic_messages.parse,
        anthropic_messages.MessageWriter,
        anthropic_messages.error_body,
        anthropic_messages.error_body,
        True,
    ),
}
