"""The protocols in which completions are requested, by their paths, and their streams. Imports no jax."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from groupax.serve.exchange import Exchange, Writer
from groupax.serve.protocols import anthropic, responses
from groupax.serve.protocols.openai import ResponseBuilder
from groupax.serve.requests import Incoming, parse
from groupax.serve.web import CLIENT_GONE, ApiError, as_api_error, unless_disconnected


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


class EventStream(Response):
    """A response of server-sent events, one per object. An error becomes the last event.

    Args:
        events: The objects.
        protocol: How events and errors are written.
        cancel: Called at the end, whatever ends the response.
        deadline_s: Deadline by `time.monotonic`.

    Attributes:
        on_end: Called at the end, when `status_code` is final.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        protocol: Protocol,
        cancel: Callable[[], None],
        deadline_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._protocol, self._cancel = events, protocol, cancel
        self._deadline_s = deadline_s
        self.on_end: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, as an ASGI application."""

        async def send_body(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async def send_events() -> None:
            async for event in self._events:
                await send_body(self._protocol.encode_event(event))

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await unless_disconnected(send_events(), receive, self._deadline_s)
                await send_body(self._protocol.end, more=False)
            except (ClientDisconnect, OSError):
                raise
            except Exception as error:  # noqa: BLE001 - sent, and logged
                fault = as_api_error(error, scope)
                self.status_code = fault.status
                await send_body(self._protocol.encode_event(self._protocol.error_event(fault)), more=False)
        except (ClientDisconnect, OSError):
            self.status_code = CLIENT_GONE
        finally:
            self._cancel()
            self.on_end()


def _openai(is_chat: bool) -> Protocol:
    def parsed(body: bytes) -> Incoming:
        return Incoming(parse(body, is_chat))

    return Protocol(parsed, ResponseBuilder, lambda error: error.body, lambda error: error.body, has_event_names=False)


PROTOCOLS = {
    "/v1/completions": _openai(is_chat=False),
    "/v1/chat/completions": _openai(is_chat=True),
    "/v1/responses": Protocol(
        responses.parse,
        responses.ResponseWriter,
        lambda error: error.body,
        lambda error: {**error.body["error"], **error.body, "type": "error", "sequence_number": 0},
        has_event_names=True,
    ),
    "/v1/messages": Protocol(
        anthropic.parse, anthropic.MessageWriter, anthropic.error_body, anthropic.error_body, has_event_names=True
    ),
}
