"""Connections that cannot be held open for nothing: limits on their number, their headers and their time.

    connected ──► head ──► body ──► answer ──┐      head, body: until a deadline that moves with what has arrived
                    ▲                        │      answer: whoever takes nothing of it is cut off
                    └──── keep-alive ◄───────┘      head, body, keep-alive: the oldest goes when there are too many

These are uvicorn's connections over httptools, with the limits that uvicorn does not have.
"""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from groupax.serve.errors import ApiError
from groupax.serve.notices import Notices

MAX_PIPELINED = 32  # requests that a client may send before the answer to the first one
BYTES_PER_S = 64 << 10  # a body or an answer of so many bytes has a second more than a small one
LINGER_S = 2.0  # for a client to read why it was refused, before the connection is cut


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a connection may take.

    Attributes:
        max_connections: open at once. For one more the oldest that waits for its client is closed; if all are being
            answered the new one is refused.
        max_header_bytes: of a request's line and its headers together.
        max_headers: of a request.
        receive_timeout_s: from the first byte of a request, or from the connection, to the end of the request's body;
            one second more for each 64 KiB that arrive.
        send_timeout_s: the longest that a client may take nothing of what is sent; one second more for each 64 KiB.
    """

    max_connections: int = 1024
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    receive_timeout_s: float = 30.0
    send_timeout_s: float = 60.0


@dataclass(frozen=True)
class Connections:
    """What all connections of a server share.

    Attributes:
        bounds: of each.
        notices: where it is told what was closed.
        waiting: those whose clients have to send something, the one that has waited longest first.
    """

    bounds: Bounds
    notices: Notices
    waiting: "dict[Connection, None]" = field(default_factory=dict)


class Connection(HttpToolsProtocol):
    """A client's connection; `uvicorn.Config(http=partial(Connection, shared))`.

    Args:
        shared: the limits, and the other connections.
        arguments: uvicorn's.
    """

    def __init__(self, shared: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.shared, self.bounds = shared, shared.bounds
        self._num_open = 0  # requests with a complete head and no complete answer
        self._is_refused = False
        self._begun_s = 0.0  # when the client had to send something
        self._has_begun = False  # and whether it has
        self._is_head, self._num_received = True, 0
        self._head_bytes = self._num_headers = self._unparsed_bytes = 0
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None

    # -- asyncio's

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # `pause_writing` tells of whatever the client does not take
        waiting = self.shared.waiting
        if len(self.connections) > self.bounds.max_connections:
            oldest = next(iter(waiting), None)
            if oldest is None:
                self._tell("connections refused: as many as --max_connections are being answered")
                self._write_error(ApiError(503, "this server has too many connections; try again later"))
                transport.close()
                self._is_refused = True
                return
            self._tell("waiting connections closed for new ones: there were more than --max_connections")
            oldest.cut()
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_waiting()
        self._stop_sending()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._receiving is None and not self._num_open:
            self._wait_for_request()
        was_head = self._is_head
        try:
            self.parser.feed_data(data)  # pyright: ignore[reportOptionalMemberAccess]
        except httptools.HttpParserUpgrade:  # answered like any other request
            pass
        except httptools.HttpParserError:
            self._refuse(400, "the request is not HTTP as RFC 9112 has it")
            return
        self._has_begun = True
        self._num_received += len(data)
        if self._is_head and was_head:
            self._unparsed_bytes += len(data)  # of a header that has not come to its end, too
            if self._unparsed_bytes > 2 * self.bounds.max_header_bytes:
                self._refuse(431, self._too_large())

    def pause_writing(self) -> None:
        """The client does not take what is sent."""
        super().pause_writing()
        self._stop_sending()
        timeout_s = self.bounds.send_timeout_s + self.transport.get_write_buffer_size() / BYTES_PER_S
        self._sending = self.loop.call_later(timeout_s, self._cut_reader)

    def resume_writing(self) -> None:
        """The client has taken all of it."""
        super().resume_writing()
        self._stop_sending()

    # -- the parser's

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._is_head, self._head_bytes, self._num_headers, self._unparsed_bytes = True, 0, 0, 0
        if self._receiving is None or not self._has_begun:
            self._wait_for_request()

    def on_url(self, url: bytes) -> None:
        """A part of the request's line."""
        self._head_bytes += len(url)
        self._check_head()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer behind a chunked body."""
        self._head_bytes += len(name) + len(value) + len(": \r\n")
        self._num_headers += 1
        self._check_head()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request can be answered."""
        self._is_head = False
        self._num_open += 1
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self._refuse_here(400, f"more than {MAX_PIPELINED} requests came before the first was answered")

    def on_message_complete(self) -> None:
        """The whole request is there."""
        super().on_message_complete()
        self._stop_waiting()
        if not self._num_open:  # answered before it was all there
            self._wait_for_request()

    def on_response_complete(self) -> None:
        """A request is answered."""
        self._num_open -= 1
        super().on_response_complete()
        if self.transport.is_closing() or self._num_open:
            return
        if self.cycle.more_body:  # which nobody reads: its sender may come to its end
            self._begun_s = self.loop.time() - self.bounds.receive_timeout_s + LINGER_S
            self._num_received = 0
            self._arm()
        else:
            self.shared.waiting[self] = None

    # -- limits

    def cut(self) -> None:
        """Close the connection at once."""
        self._stop_waiting()
        self._is_refused = True
        self.transport.abort()

    def _check_head(self) -> None:
        if self._head_bytes > self.bounds.max_header_bytes:
            self._refuse_here(431, self._too_large())
        if self._num_headers > self.bounds.max_headers:
            self._refuse_here(431, f"the request has more than {self.bounds.max_headers} headers")

    def _too_large(self) -> str:
        return f"the line and the headers of the request have more than {self.bounds.max_header_bytes} bytes"

    def _refuse_here(self, status: int, message: str) -> None:
        """Refuse within a callback of the parser, which ends there.

        Raises:
            HttpParserError: always.
        """
        self._refuse(status, message)
        raise httptools.HttpParserError(message)

    def _wait_for_request(self) -> None:
        self._begun_s, self._num_received, self._has_begun = self.loop.time(), 0, False
        self.shared.waiting[self] = None
        self._arm()

    def _arm(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = self.loop.call_at(self._deadline_s(), self._look_at_deadline)

    def _deadline_s(self) -> float:
        return self._begun_s + self.bounds.receive_timeout_s + self._num_received / BYTES_PER_S

    def _look_at_deadline(self) -> None:
        if self.flow.read_paused:  # it is the server that does not read
            self._begun_s = self.loop.time()
        if self.loop.time() < self._deadline_s():
            self._arm()
            return
        if not self._has_begun or (self.cycle is not None and self.cycle.response_complete and not self._is_head):
            self.cut()
            return
        self._tell("connections closed: their requests did not arrive in time")
        seconds = self.bounds.receive_timeout_s
        self._refuse(408, f"the request did not arrive within {seconds:g} s; send it faster", told=True)

    def _refuse(self, status: int, message: str, told: bool = False) -> None:
        """Answer with an error, if the client cannot take that for a part of another answer, and close."""
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_waiting()
        if not told:
            self._tell(f"requests refused by their form (status {status})")
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

    def _cut_reader(self) -> None:
        self._tell("connections closed: their clients read nothing")
        self.cut()

    def _stop_waiting(self) -> None:
        self.shared.waiting.pop(self, None)
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _tell(self, kind: str) -> None:
        self.shared.notices.add(kind, f"one of them from {self.client[0] if self.client else 'a socket'}")
