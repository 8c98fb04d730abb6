"""uvicorn's connections over httptools, with limits on their number, their headers and their time.

connected ──► head ──► body ──► response ──┐    head, body: a deadline that moves with the bytes that have arrived
                ▲                          │    response: a client that reads nothing is disconnected
                └───── keep-alive ◄────────┘    head, body, keep-alive: the oldest is closed if there are too many
"""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from groupax.serve.errors import ApiError
from groupax.serve.rate_limited_log import RateLimitedLog

MAX_PIPELINED = 32  # requests that a client may send before the first response
BYTES_PER_S = 64 << 10  # timeouts of bodies and responses grow by one second per this many bytes
LINGER_S = 2.0  # for a client to read why it was refused, before the connection is closed


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        max_connections: Most open connections. One more closes the connection that has waited longest for its client;
            if none waits, the new one is refused.
        max_header_bytes: Size of a request line and its headers together.
        max_headers: Number of headers of a request.
        receive_timeout_s: Time from the connection, or from the first byte of a request, to the end of the request's
            body, plus one second for each 64 KiB that arrive.
        send_timeout_s: Longest time for which a client may read nothing, plus one second for each 64 KiB.
    """

    max_connections: int = 1024
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    receive_timeout_s: float = 30.0
    send_timeout_s: float = 60.0


@dataclass(frozen=True)
class Connections:
    """State shared by all connections of a server.

    Attributes:
        limits: Limits of each.
        log: Log of closed connections.
        waiting: Connections whose clients must send something, in the order of their waiting.
    """

    limits: ConnectionLimits
    log: RateLimitedLog
    waiting: "dict[Connection, None]" = field(default_factory=dict)


class Connection(HttpToolsProtocol):
    """A client's connection; `uvicorn.Config(http=partial(Connection, shared))`.

    Args:
        shared: The limits and the other connections.
        arguments: Arguments from uvicorn.
    """

    def __init__(self, shared: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.shared, self.limits = shared, shared.limits
        self._num_open = 0  # requests with a complete head and no complete response
        self._is_refused = False
        self._start_s = 0.0  # when the client had to send something
        self._has_sent = False  # since then
        self._is_head, self._num_received = True, 0
        self._head_bytes = self._num_headers = self._unparsed_bytes = 0
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None

    # -- callbacks of asyncio

    def connection_made(self, transport: Any) -> None:
        """Registers a new connection."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # call `pause_writing` for any unread byte
        waiting = self.shared.waiting
        if len(self.connections) > self.limits.max_connections:
            oldest = next(iter(waiting), None)
            if oldest is None:
                self._log("connections refused: all of --max_connections are busy")
                self._write_error(ApiError(503, "this server has too many connections; try again later"))
                transport.close()
                self._is_refused = True
                return
            self._log("waiting connections closed for new ones: there were more than --max_connections")
            oldest.abort()
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timers of a lost connection."""
        self._stop_waiting()
        self._stop_sending()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses received bytes."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._receiving is None and not self._num_open:
            self._wait_for_request()
        was_head = self._is_head
        try:
            self.parser.feed_data(data)  # pyright: ignore[reportOptionalMemberAccess]
        except httptools.HttpParserUpgrade:  # handled like any other request
            pass
        except httptools.HttpParserError:
            self._refuse(400, "the request is not valid HTTP (RFC 9112)")
            return
        self._has_sent = True
        self._num_received += len(data)
        if self._is_head and was_head:
            self._unparsed_bytes += len(data)  # includes an unfinished header
            if self._unparsed_bytes > 2 * self.limits.max_header_bytes:
                self._refuse(431, self._too_large())

    def pause_writing(self) -> None:
        """Starts the timeout of a client that does not read."""
        super().pause_writing()
        self._stop_sending()
        timeout_s = self.limits.send_timeout_s + self.transport.get_write_buffer_size() / BYTES_PER_S
        self._sending = self.loop.call_later(timeout_s, self._abort_reader)

    def resume_writing(self) -> None:
        """Stops the timeout: the client has read everything."""
        super().resume_writing()
        self._stop_sending()

    # -- callbacks of the parser

    def on_message_begin(self) -> None:
        """Handles the first byte of a request."""
        super().on_message_begin()
        self._is_head, self._head_bytes, self._num_headers, self._unparsed_bytes = True, 0, 0, 0
        if self._receiving is None or not self._has_sent:
            self._wait_for_request()

    def on_url(self, url: bytes) -> None:
        """Counts a part of the request line."""
        self._head_bytes += len(url)
        self._check_head()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header, or a trailer after a chunked body."""
        self._head_bytes += len(name) + len(value) + len(": \r\n")
        self._num_headers += 1
        self._check_head()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Handles the end of a request's head."""
        self._is_head = False
        self._num_open += 1
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self._refuse_here(400, f"more than {MAX_PIPELINED} requests came before the first response")

    def on_message_complete(self) -> None:
        """Handles the end of a request."""
        super().on_message_complete()
        self._stop_waiting()
        if not self._num_open:  # the response came before the end of the request
            self._wait_for_request()

    def on_response_complete(self) -> None:
        """Handles the end of a response."""
        self._num_open -= 1
        super().on_response_complete()
        if self.transport.is_closing() or self._num_open:
            return
        if self.cycle.more_body:  # nobody reads it, but its sender may finish
            self._start_s = self.loop.time() - self.limits.receive_timeout_s + LINGER_S
            self._num_received = 0
            self._arm()
        else:
            self.shared.waiting[self] = None

    # -- limits

    def abort(self) -> None:
        """Closes the connection at once."""
        self._stop_waiting()
        self._is_refused = True
        self.transport.abort()

    def _check_head(self) -> None:
        if self._head_bytes > self.limits.max_header_bytes:
            self._refuse_here(431, self._too_large())
        if self._num_headers > self.limits.max_headers:
            self._refuse_here(431, f"the request has more than {self.limits.max_headers} headers")

    def _too_large(self) -> str:
        return f"the request line and the headers have more than {self.limits.max_header_bytes} bytes"

    def _refuse_here(self, status: int, message: str) -> None:
        """Refuses a request within a callback of the parser, which stops there.

        Raises:
            HttpParserError: always.
        """
        self._refuse(status, message)
        raise httptools.HttpParserError(message)

    def _wait_for_request(self) -> None:
        self._start_s, self._num_received, self._has_sent = self.loop.time(), 0, False
        self.shared.waiting[self] = None
        self._arm()

    def _arm(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = self.loop.call_at(self._deadline_s(), self._check_deadline)

    def _deadline_s(self) -> float:
        return self._start_s + self.limits.receive_timeout_s + self._num_received / BYTES_PER_S

    def _check_deadline(self) -> None:
        if self.flow.read_paused:  # the server does not read
            self._start_s = self.loop.time()
        if self.loop.time() < self._deadline_s():
            self._arm()
            return
        if not self._has_sent or (self.cycle is not None and self.cycle.response_complete and not self._is_head):
            self.abort()
            return
        self._log("connections closed: their requests did not arrive in time")
        seconds = self.limits.receive_timeout_s
        self._refuse(408, f"the request did not arrive within {seconds:g} s; send it faster", is_logged=True)

    def _refuse(self, status: int, message: str, is_logged: bool = False) -> None:
        """Closes the connection, with an error unless that could be mistaken for a part of another response."""
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_waiting()
        if not is_logged:
            self._log(f"malformed requests refused (status {status})")
        has_own_cycle = not self._is_head and self.cycle is not None
        others = self._num_open - has_own_cycle
        if others > 0 or (has_own_cycle and self.cycle.response_started):
            self.transport.abort()
            return
        if has_own_cycle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._write_error(ApiError(status, message))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _write_error(self, error: ApiError) -> None:
        body = json.dumps(error.body).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head.encode() + body)

    def _abort_reader(self) -> None:
        self._log("connections closed: their clients read nothing")
        self.abort()

    def _stop_waiting(self) -> None:
        self.shared.waiting.pop(self, None)
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _log(self, kind: str) -> None:
        self.shared.log.add(kind, f"one of them from {self.client[0] if self.client else 'a socket'}")
