"""The WebSocket of an OpenEnv server: a connection is a session of it. Imports no jax.

Source: OpenEnv 0.10.0, `core/env_server/types.py` for the messages and `core/env_client.py` for the limits.
"""

import asyncio
import contextlib
import ipaddress
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from groupax.errors import InfrastructureError
from groupax.terminal.printable import printable, short_repr

INVALID, CAPACITY = "VALIDATION_ERROR", "CAPACITY_REACHED"
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
CAPACITY_PAUSE_S = 0.25
CLOSE_S = 5.0


class InvalidActionError(ValueError):
    """The server refuses an action, since it is not of the environment's type."""


class CapacityError(InfrastructureError):
    """All sessions of the server are in use."""


@dataclass(frozen=True)
class Server:
    """The address of a server, and limits.

    Attributes:
        url: Address of its WebSocket.
        connect_timeout_s: Time in which a session must begin.
        message_timeout_s: Time in which a message must be answered.
        max_message_bytes: Longest message.
        headers: Further HTTP headers, such as those of a login.
    """

    url: str
    connect_timeout_s: int | float = 10.0
    message_timeout_s: int | float = 60.0
    max_message_bytes: int = 100 << 20
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_local(self) -> bool:
        """True if the server is on this machine, which no proxy reaches."""
        host = urlsplit(self.url).hostname or ""
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def read(self, path: str) -> Any:
        """Returns the JSON at a path of the server; None if there is nothing.

        Raises:
            InfrastructureError: The server does not answer.
        """
        scheme, host, base, *_ = urlsplit(self.url)
        address = urlunsplit((scheme.replace("ws", "http"), host, base.removesuffix("/ws") + path, "", ""))
        handlers = [urllib.request.ProxyHandler({})] if self.is_local else []
        request = urllib.request.Request(address, headers=dict(self.headers))
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=self.connect_timeout_s) as answer:
                return json.loads(answer.read(self.max_message_bytes))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise InfrastructureError(f"{address} answers with HTTP {error.code}") from error
        except (OSError, ValueError) as error:
            raise InfrastructureError(f"{address} cannot be read: {error}") from error


def websocket_url(url: str) -> str:
    """Returns the address of the WebSocket of a server's address, which may be that of its web pages.

    Raises:
        ValueError: It is no such address.
    """
    scheme, host, path, query, fragment = urlsplit(url)
    if scheme not in SCHEMES or not host or query or fragment:
        raise ValueError(f"openenv takes an address such as ws://127.0.0.1:8000 or https://host/path, got {url!r:.200}")
    return urlunsplit((SCHEMES[scheme], host, path.rstrip("/").removesuffix("/ws") + "/ws", "", ""))


class Connection:
    """A session of a server. It belongs to the event loop of its first request.

    Args:
        server: Address and limits.
    """

    def __init__(self, server: Server) -> None:
        self._server, self._socket, self._is_lost = server, None, False
        self._guard: asyncio.Task[None] | None = None

    async def request(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the data of the answer to a message; the first one connects.

        Raises:
            InvalidActionError: The action is not of the environment's type.
            InfrastructureError: There is no answer, or the environment failed.
        """
        if self._is_lost:
            raise InfrastructureError(f"the session of {self._server.url} was lost before")
        message = json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
        is_answered = False
        try:
            answer = await (self._begun(message) if self._socket is None else self._exchanged(message))
            is_answered = True
        finally:
            if not is_answered:  # a late answer would be taken for that of the next message
                self._lose()
        return self._data(answer)

    async def close(self) -> None:
        """Ends the session, which the server then frees."""
        socket, self._socket, self._is_lost = self._socket, None, True
        if socket is not None:
            with contextlib.suppress(Exception):  # the server frees a session whose connection has ended too
                await socket.send(json.dumps({"type": "close"}))
                await asyncio.wait_for(socket.close(), CLOSE_S)
            self._release()

    async def _begun(self, message: str) -> dict[str, Any]:
        """Connects and returns the first answer. While all sessions are in use, it tries again for a while."""
        deadline_s = time.monotonic() + self._server.connect_timeout_s
        while True:
            self._socket = await self._connected()
            self._guard = asyncio.create_task(_abort_at_end(self._socket))
            try:
                return self._checked(await self._exchanged(message))
            except CapacityError:
                self._release()
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(CAPACITY_PAUSE_S)

    async def _connected(self) -> Any:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        server = self._server
        try:
            return await connect(
                server.url,
                open_timeout=server.connect_timeout_s,
                max_size=server.max_message_bytes,
                additional_headers=dict(server.headers),
                proxy=None if server.is_local else True,
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise InfrastructureError(f"{server.url} cannot be reached: {error or type(error).__name__}") from error

    async def _exchanged(self, message: str) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        assert self._socket is not None, "connected"
        try:
            with contextlib.suppress(ConnectionClosed):  # a server without free sessions has said so before it closed
                await self._socket.send(message)
            text = await asyncio.wait_for(self._socket.recv(), self._server.message_timeout_s)
        except TimeoutError as error:
            limit_s = self._server.message_timeout_s
            raise InfrastructureError(f"{self._server.url} has not answered within {limit_s:g} s") from error
        except (OSError, ConnectionClosed) as error:
            raise InfrastructureError(f"{self._server.url} has ended the session: {error}") from error
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise InfrastructureError(f"{self._server.url} does not answer as OpenEnv does: {short_repr(text)}")
        return answer

    def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        if answer.get("type") == "error" and answer["data"].get("code") == CAPACITY:
            raise CapacityError(
                f"{self._server.url} has {short_repr(answer['data'].get('max_sessions'))} sessions, all of them in "
                "use; every episode of a rollout needs one, so start the server with a larger max_concurrent_envs"
            )
        return answer

    def _data(self, answer: dict[str, Any]) -> dict[str, Any]:
        data = answer["data"]
        if answer.get("type") != "error":
            return data
        text = printable(str(data.get("message", "")))[:500]
        if data.get("code") == INVALID:
            faults = [each for each in data.get("errors") or () if isinstance(each, dict)]
            reasons = [f"{each.get('loc')}: {each.get('msg')}" for each in faults]
            raise InvalidActionError(printable("; ".join([text, *reasons]))[:500])
        raise InfrastructureError(f"the environment failed on the server ({short_repr(data.get('code'))}): {text}")

    def _lose(self) -> None:
        self._socket, self._is_lost = None, True
        self._release()

    def _release(self) -> None:
        if self._guard is not None:
            self._guard.cancel()
            self._guard = None


async def _abort_at_end(socket: Any) -> None:
    """Waits until it is cancelled, which the end of the event loop does too, and ends the connection then."""
    try:
        await asyncio.Event().wait()
    finally:
        socket.transport.abort()
