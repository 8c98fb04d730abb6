"""Limits of uvicorn's connections, so that slow clients stop no others: their number, their heads and their time."""

import asyncio
import socket
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # of a request line and headers that have not arrived completely
BYTES_PER_S = 64 << 10  # the time for a request grows by one second per this many bytes


def limited(
    max_connections: int, receive_timeout_s: float = 30.0, send_timeout_s: float = 60.0
) -> "partial[asyncio.Protocol]":
    """Returns the protocol of a server whose connections are limited, for `uvicorn.Config(http=...)`.

    Args:
        max_connections: Most open connections. One more closes the connection that has waited longest for its client;
            if no other waits, the new one.
        receive_timeout_s: Time from the connection, the previous response, or the first byte of a request, to the end
            of the request's body, plus one second for each 64 KiB that arrive.
        send_timeout_s: Longest time for which a client may read nothing of what was sent.
    """
    return partial(Connection, max_connections, receive_timeout_s, send_timeout_s, {})


class Connection(HttpToolsProtocol):
    """A client's connection (see `limited`).

    Args:
        max_connections: Most open connections.
        receive_timeout_s: Time for a request to arrive.
        send_timeout_s: Longest time for which the client may read nothing.
        waiting: The connections of the server that wait for their clients, in the order of their waiting.
        arguments: Arguments from uvicorn.
    """

    def __init__(
        self,
        max_connections: int,
        receive_timeout_s: float,
        send_timeout_s: float,
        waiting: "dict[Connection, None]",
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._max_connections, self._waiting = max_connections, waiting
        self._receive_timeout_s, self._send_timeout_s = receive_timeout_s, send_timeout_s
        self._begun_s = 0.0  # when the client had to send something
        self._num_received = self._head_bytes = 0
        self._is_head = True
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Registers a new connection."""
        super().connection_made(transport)
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._send_timeout_s))
        self._wait()
        if len(self.connections) > self._max_connections:
            next(iter(self._waiting)).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a lost connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses received bytes."""
        self._num_received += len(data)
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if self._is_head else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"the request line and the headers have more than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """Handles the first byte of a request."""
        super().on_message_begin()
        self._is_head = True
        self._wait()

    def on_headers_complete(self) -> None:
        """Handles the end of a request's head."""
        self._is_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Handles the end of a request."""
        super().on_message_complete()
        self._stop_waiting()

    def on_response_complete(self) -> None:
        """Handles the end of a response."""
        super().on_response_complete()
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self._wait()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._stop_waiting()
        self.transport.abort()

    def _wait(self) -> None:
        self._stop_waiting()
        self._waiting[self] = None
        self._begun_s, self._num_received = self.loop.time(), 0
        self._timer = self.loop.call_later(self._receive_timeout_s, self._check_time)

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _check_time(self) -> None:
        if self.flow.read_paused:  # it is the server that does not read
            self._begun_s = self.loop.time()
        left_s = self._begun_s + self._receive_timeout_s + self._num_received / BYTES_PER_S - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._check_time)
        else:
            self.abort()
