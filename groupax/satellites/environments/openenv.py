"""Environments of OpenEnv servers (https://github.com/meta-pytorch/OpenEnv). Imports no jax.

An episode is a session of the server's WebSocket, whose messages are those of OpenEnv 0.10.0 (see its
`core/env_server/types.py`, and `core/env_client.py` for the limits). An environment whose actions
are MCP's has tools of the model; any other one answers the model's messages, which `action` turns into actions.
"""

import asyncio
import contextlib
import ipaddress
import json
import math
import numbers
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from groupax.core.errors import InfrastructureError, require
from groupax.core.terminal.printable import printable, short_repr
from groupax.episodes.environment import EnvironmentClass
from groupax.satellites.environments.mcp_tools import ToolError, remote_schema
from groupax.tools.tool import Step, Tool

INVALID, CAPACITY = "VALIDATION_ERROR", "CAPACITY_REACHED"
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
CAPACITY_PAUSE_S = 0.25
CLOSE_S = 5.0
GRACE_S = 5.0  # by which the time limit of a tool exceeds that of its message, which says more
Action = Callable[[str], Mapping[str, Any]]
Observe = Callable[[Mapping[str, Any]], Any]


def openenv(
    url: str,
    *,
    name: str = "openenv",
    action: Action | None = None,
    observation: Observe | None = None,
    rewards: Literal["sum", "last"] = "sum",
    reset_columns: Sequence[str] = (),
    connect_timeout_s: int | float = 10.0,
    message_timeout_s: int | float = 60.0,
    max_message_mb: int | float = 100.0,
    headers: Mapping[str, str] | None = None,
) -> EnvironmentClass:
    """Returns the environment that an OpenEnv server runs, for `GRPOTrainer(environments=...)`.

    The server is asked for its tools and the type of its actions at once.

    Args:
        url: Address of the server, such as ws://127.0.0.1:8000 or https://host/path.
        name: Name of the environment in metrics.
        action: Turns the text of a message of the model into an action, as a dict; a ValueError of it is a text that
            the model reads. None takes the text as the only field of the action that must be given.
        observation: Turns an observation, as a dict, into what the model reads: a text, messages, or None. None takes
            its only field, if that is a text, or else all fields that are not empty, as JSON.
        rewards: Reward of an episode: the sum of the server's rewards, or the last of them.
        reset_columns: Columns of the dataset that `reset` of the environment takes, in addition to the seed.
        connect_timeout_s: Time in which a session must begin.
        message_timeout_s: Time in which the server must answer.
        max_message_mb: Longest message of the server.
        headers: Further HTTP headers, such as those of a login.

    Raises:
        ImportError: websockets is not installed.
        ValueError: The address is invalid, or the environment's actions are not understood.
        InfrastructureError: The server does not answer.
    """
    require("openenv", "openenv(...)")
    if rewards not in ("sum", "last"):
        raise ValueError(f"openenv takes rewards='sum' or 'last', got {rewards!r}")
    for setting, value in (
        ("connect_timeout_s", connect_timeout_s),
        ("message_timeout_s", message_timeout_s),
        ("max_message_mb", max_message_mb),
    ):
        if not value > 0:
            raise ValueError(f"openenv takes a positive {setting}, got {value}")
    limits = connect_timeout_s, message_timeout_s, int(max_message_mb * (1 << 20))
    server = Server(websocket_url(url), *limits, dict(headers or {}))
    schema = server.read("/schema")
    fields = _action_fields(schema)
    tools = _tools(server) if fields is None or "tool_name" in fields or not fields else {}
    if action is None and not tools:
        field_name = _text_field(url, schema)
        action = lambda text: {field_name: text}  # noqa: E731
    methods = (
        {"reset", "close"} | ({"act"} if action is not None else set()) | ({"score"} if rewards == "last" else set())
    )
    create = partial(OpenEnvSession, server, action, observation or default_observation, rewards, tuple(reset_columns))
    return EnvironmentClass(name, create, tools, frozenset(methods))


class OpenEnvSession:
    """An episode in an environment of a server."""

    def __init__(
        self,
        server: "Server",
        action: Action | None,
        observe: Observe,
        rewards: Literal["sum", "last"],
        reset_columns: tuple[str, ...],
    ) -> None:
        self._connection, self._action, self._observe = Connection(server), action, observe
        self._rewards, self._reset_columns, self._last = rewards, reset_columns, 0.0

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Begins a session and returns what the model reads first."""
        missing = [name for name in self._reset_columns if name not in row]
        if missing:
            raise ValueError(f"the dataset has no column {', '.join(missing)}, which reset_columns of openenv names")
        columns = {name: row[name] for name in self._reset_columns}
        try:
            data = await self._connection.request("reset", {**columns, "seed": seed, "episode_id": uuid.uuid4().hex})
            observed = self._observe(_observation(data))
        except BaseException:
            await self._connection.close()
            raise
        return observed or None

    async def act(self, message: Mapping[str, Any]) -> Step:
        """Answers a message by a step of the environment."""
        assert self._action is not None, "act is one of its methods"
        try:
            action = dict(self._action(message["content"]))
            data = await self._connection.request("step", action)
        except ValueError as error:  # of the action, which is the model's
            return Step(str({"error": printable(str(error))}))
        observed, reward, done = self._observe(_observation(data)), self._reward(data), data.get("done") is True
        return Step("" if observed is None and not done else observed, reward, done)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Step:
        """Returns the result of a tool of the environment."""
        action = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        data = await self._connection.request("step", action)
        reward, done = self._reward(data), data.get("done") is True
        text, error = _result(_observation(data))
        if not error:
            return Step(text, reward, done)
        if not reward and not done:
            raise ToolError(error)
        return Step(str({"error": error}), reward, done)

    def score(self) -> float:
        """Returns the last reward."""
        return self._last

    async def close(self) -> None:
        """Ends the session."""
        await self._connection.close()

    def _reward(self, data: Mapping[str, Any]) -> float | None:
        """Returns the reward of a step, unless the last one counts."""
        reward = data.get("reward")
        if reward is None:
            return None
        if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
            raise InfrastructureError(
                f"the environment gave the reward {short_repr(reward)}, which is not a finite number"
            )
        self._last = float(reward)
        return self._last if self._rewards == "sum" else None


def default_observation(observation: Mapping[str, Any]) -> str | None:
    """Returns an observation's only field, if that is a text, or else all fields that are not empty, as JSON."""
    fields = {
        name: value for name, value in observation.items() if name != "metadata" and value not in (None, "", [], {})
    }
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return json.dumps(fields, ensure_ascii=False) if fields else None


def _observation(data: Mapping[str, Any]) -> Mapping[str, Any]:
    observation = data.get("observation")
    if not isinstance(observation, Mapping):
        raise InfrastructureError(f"the server's answer has no observation: {short_repr(data)}")
    return observation


def _result(observation: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns the result of a tool, and the reason if there is none."""
    error, result = observation.get("error"), observation.get("result")
    if isinstance(error, Mapping):
        text = printable(str(error.get("message") or error.get("error_type")))
        if error.get("error_type") == "transport_error":
            raise InfrastructureError(f"the server cannot reach its tool: {text[:500]}")
        return None, text
    if not isinstance(result, Mapping) or not isinstance(parts := result.get("content"), list):
        return result, ""
    texts = [str(part.get("text", "")) for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    text = "\n".join(texts)
    return (None, text or "the tool failed") if result.get("is_error") else (text, "")


def _action_fields(schema: Any) -> Mapping[str, Any] | None:
    """Returns the fields of the environment's actions; None if the server does not describe them."""
    action = schema.get("action") if isinstance(schema, Mapping) else None
    properties = action.get("properties") if isinstance(action, Mapping) else None
    if not isinstance(properties, Mapping):
        return None
    return {name: value for name, value in properties.items() if name != "metadata"}


def _text_field(url: str, schema: Any) -> str:
    """Returns the only field of an action that must be given, or the only one, which must be a text."""
    fields = _action_fields(schema) or {}
    required = [name for name in (schema or {}).get("action", {}).get("required", ()) if name in fields] or list(fields)
    only = fields.get(required[0]) if len(required) == 1 else None
    if not isinstance(only, Mapping) or only.get("type") != "string":
        raise ValueError(
            f"openenv({url!r}): the environment has no tools, and its actions have "
            f"{f'the fields {short_repr(fields)}' if fields else 'fields that it does not describe'} instead of one "
            "text; give action=, a function that turns a text of the model into an action, as a dict"
        )
    return required[0]


def _tools(server: "Server") -> dict[str, Tool]:
    """Returns the tools of an environment by name, in the order of the names; none if it has no tools."""

    async def listed() -> list[Any]:
        connection = Connection(server)
        try:
            tools = _observation(await connection.request("step", {"type": "list_tools"})).get("tools")
        except InvalidActionError:
            return []
        finally:
            await connection.close()
        return tools if isinstance(tools, list) else []

    with ThreadPoolExecutor(1) as pool:  # this thread may have an event loop
        found = [each for each in pool.submit(asyncio.run, listed()).result() if isinstance(each, Mapping)]
    schemas = [
        remote_schema(
            server.url, each.get("name"), each.get("description"), each.get("input_schema", each.get("inputSchema"))
        )
        for each in found
    ]
    schemas.sort(key=lambda schema: schema["function"]["name"])
    return {schema["function"]["name"]: _tool(schema, server.message_timeout_s) for schema in schemas}


def _tool(schema: dict[str, Any], timeout_s: float) -> Tool:
    name = schema["function"]["name"]

    async def call(session: OpenEnvSession, /, **arguments: Any) -> Step:
        return await session.call_tool(name, arguments)

    return Tool(name, call, schema, is_async=True, timeout_s=timeout_s + GRACE_S, takes_owner=True)


# -- the connection to a server


class InvalidActionError(ValueError):
    """The server refuses an action, since it is not of the environment's type."""


class FailedOnServerError(InfrastructureError):
    """The environment has failed on the server, whose session continues."""


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
        """Returns the JSON at a path of the server; None if there is nothing."""
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
    """Returns the address of the WebSocket of a server's address, which may be that of its web pages."""
    scheme, host, path, query, fragment = urlsplit(url)
    if scheme not in SCHEMES or not host or query or fragment:
        raise ValueError(f"openenv takes an address such as ws://127.0.0.1:8000 or https://host/path, got {url!r:.200}")
    return urlunsplit((SCHEMES[scheme], host, path.rstrip("/").removesuffix("/ws") + "/ws", "", ""))


class Connection:
    """A session of a server. It belongs to the event loop of its first request."""

    def __init__(self, server: Server) -> None:
        self._server, self._socket, self._is_lost = server, None, False
        self._guard: asyncio.Task[None] | None = None

    async def request(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the data of the answer to a message; the first one connects."""
        if self._is_lost:
            raise InfrastructureError(f"the session of {self._server.url} was lost before")
        message = json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
        try:
            return await (self._begun(message) if self._socket is None else self._answer(message))
        except (InvalidActionError, FailedOnServerError):
            raise
        except BaseException:  # a late answer would be taken for that of the next message
            self._socket, self._is_lost = None, True
            self._release()
            raise

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
                return await self._answer(message)
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

    async def _answer(self, message: str) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        assert self._socket is not None, "connected"
        url, limit_s = self._server.url, self._server.message_timeout_s
        try:
            with contextlib.suppress(ConnectionClosed):  # a server without free sessions has said so before it closed
                await self._socket.send(message)
            text = await asyncio.wait_for(self._socket.recv(), limit_s)
        except TimeoutError as error:
            raise InfrastructureError(f"{url} has not answered within {limit_s:g} s") from error
        except (OSError, ConnectionClosed) as error:
            raise InfrastructureError(f"{url} has ended the session: {error}") from error
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or not isinstance(data, dict):
            raise InfrastructureError(f"{url} does not answer as OpenEnv does: {short_repr(text)}")
        if answer.get("type") != "error":
            return data
        if data.get("code") == CAPACITY:
            raise CapacityError(
                f"{url} has {short_repr(data.get('max_sessions'))} sessions, all of them in use; every episode of a "
                "rollout needs one, so start the server with a larger max_concurrent_envs"
            )
        reasons = [str(data.get("message", ""))[:500]]
        if data.get("code") == INVALID:
            faults = [each for each in data.get("errors") or () if isinstance(each, dict)]
            reasons += [f"{each.get('loc')}: {each.get('msg')}" for each in faults]
            raise InvalidActionError(printable("; ".join(reasons))[:500])
        code = short_repr(data.get("code"))
        raise FailedOnServerError(f"the environment failed on the server ({code}): {printable(reasons[0])}")

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
