"""Tools of servers of the Model Context Protocol (https://modelcontextprotocol.io). Imports no jax.

A session is a task of an event loop, which has started the server or has connected to it. One serves the calls of all
episodes of a run at the same time, unless each episode has its own.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import shlex
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from groupax.core.errors import InfrastructureError, require
from groupax.core.terminal.printable import error_line, one_line, printable, short_repr
from groupax.tools.runner import start_loop
from groupax.tools.tool import Tool

logger = logging.getLogger(__name__)
GRACE_S = 5.0
MOST_PAGES = 100
LOGGERS = ("mcp.client.stdio", "mcp.client.streamable_http", "mcp.shared.tool_name_validation", "client", "root")
REFUSED = (-32601, -32602)  # JSON-RPC: an unknown method, or invalid arguments
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # what all chat templates and formats of calls can write
LONGEST_SCHEMA = 1 << 17
Schemas = Mapping[str, dict[str, Any]]


class ToolError(RuntimeError):
    """A tool of the server failed; its message is for the model."""


@dataclass(frozen=True)
class McpServer:
    """The address of a server, and limits.

    Attributes:
        address: The address as it was given.
        command: Command of a server that is started; empty for one that has a URL.
        environment: Variables of its environment, in addition to those that the protocol's library passes.
        connect_timeout_s: Time in which a session must begin.
        call_timeout_s: Time limit of a call in a session that has begun; None for none.
    """

    address: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    connect_timeout_s: float = 10.0
    call_timeout_s: int | float | None = None

    @property
    def longest_call_s(self) -> float | None:
        """Time limit of a call that begins its session."""
        if self.call_timeout_s is None:
            return None
        return self.call_timeout_s + self.connect_timeout_s + GRACE_S


def mcp(
    address: str,
    *,
    only: Sequence[str] | None = None,
    stateful: bool = False,
    timeout_s: int | float | None = None,
    connect_timeout_s: int | float = 10.0,
    environment: Mapping[str, str] | None = None,
) -> list[Tool]:
    """Returns the tools of an MCP server, for `GRPOTrainer(tools=mcp("stdio:python server.py"))`.

    The server is asked for them at once.

    Args:
        address: stdio: and a command, or the URL of a server that speaks streamable HTTP.
        only: Names of the tools to use; None for all.
        stateful: Whether each episode has a session of its own, which a command's server is started for.
        timeout_s: Time limit of a call; None for `tool_timeout_s` of the run.
        connect_timeout_s: Time in which a session must begin.
        environment: Variables of the environment of a server that is started.

    Raises:
        ImportError: mcp is not installed.
        InfrastructureError: The server does not answer.
        ValueError: The address is invalid, or there is no such tool.
    """
    require("mcp", "mcp(...)", is_imported=False)
    for library_logger in LOGGERS:
        logging.getLogger(library_logger).addFilter(_say_once)
    for name, value in (("connect_timeout_s", connect_timeout_s), ("timeout_s", 1 if timeout_s is None else timeout_s)):
        if not value > 0:
            raise ValueError(f"mcp takes a positive {name}, got {value}")
    server = McpServer(address, _command(address), dict(environment or {}), float(connect_timeout_s), timeout_s)
    with ThreadPoolExecutor(1) as pool:  # this thread may have an event loop
        listed = pool.submit(asyncio.run, _list(server)).result()
    unknown = sorted(set(only or ()) - listed.keys())
    if unknown:
        raise ValueError(f"{address} has no tool {', '.join(unknown)}; it has {', '.join(listed)}")
    limit_s = server.longest_call_s
    names = [name for name in listed if only is None or name in only]
    if stateful:

        def create(_seed: int) -> McpSession:  # a lost one is not begun again, since its state is lost
            return McpSession(server)

        return [
            Tool(name, partial(_call_own, name), listed[name], True, False, limit_s, takes_owner=True, open=create)
            for name in names
        ]
    shared = SharedSession(server)
    return [Tool(name, partial(shared.call, name), listed[name], True, True, limit_s) for name in names]


class McpSession:
    """A session with a server, which begins with the first call."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._holder: asyncio.Task[None] | None = None
        self._begun: asyncio.Future[Any] | None = None
        self._closing = asyncio.Event()

    async def schemas(self) -> Schemas:
        """Returns the schemas of the server's tools by name, in the order of the names."""
        session = await self._session()
        try:
            async with asyncio.timeout(self._server.connect_timeout_s):
                return await _schemas(self._server, session)
        except Exception as error:
            raise _failure(self._server, error) from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the result of a tool: the texts of its parts, joined by line ends."""
        session = await self._session()
        assert self._holder is not None, "it holds the session"
        calling = asyncio.ensure_future(session.call_tool(name, dict(arguments)))
        try:
            limit_s = self._server.call_timeout_s
            await asyncio.wait({calling, self._holder}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return _text_of(calling.result())
            if self._holder.done():
                raise InfrastructureError(f"{self._server.address} has ended")
            raise ToolError(f"timed out after {limit_s:g} s")
        except (ToolError, InfrastructureError):
            raise
        except Exception as error:
            code = getattr(getattr(error, "error", None), "code", None)
            if code in REFUSED:
                raise ToolError(printable(str(getattr(error, "error").message))) from error  # noqa: B009
            await self.close()
            raise InfrastructureError(f"{self._server.address} does not answer: {error_line(error)}") from error
        finally:
            calling.cancel()

    @property
    def has_ended(self) -> bool:
        """True if it was closed, or the server has ended."""
        return self._closing.is_set() or (self._holder is not None and self._holder.done())

    async def close(self) -> None:
        """Ends the session, and a server that was started for it."""
        self._closing.set()
        if self._holder is not None:
            with contextlib.suppress(Exception):
                await self._holder

    async def _session(self) -> Any:
        if self._begun is None:
            self._begun = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._begun))
        return await asyncio.shield(self._begun)

    async def _hold(self, begun: "asyncio.Future[Any]") -> None:
        """Begins the session and keeps it until it is closed; all in one task, as its contexts demand."""
        import mcp.client.stdio
        import mcp.client.streamable_http  # noqa: F401 - seconds, which are not the server's

        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._server.connect_timeout_s):
                    session = await stack.enter_async_context(_connected(self._server))
                begun.set_result(session)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - of a server
            if not begun.done():  # else it was closed, or the server has ended
                begun.set_exception(_failure(self._server, error))


class SharedSession:
    """The session that the calls of all episodes use, in an event loop of its own. A lost one is begun again."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._sessions: list[McpSession] = []  # the latest one
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, name: str, /, **arguments: Any) -> str:
        """Returns the result of a tool."""
        if self._loop is None:
            self._loop = start_loop("mcp")
            weakref.finalize(self, _end, self._sessions, self._loop)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop))

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if not self._sessions or self._sessions[0].has_ended:
            self._sessions[:] = [McpSession(self._server)]
        return await self._sessions[0].call(name, arguments)


def _end(sessions: list[McpSession], loop: asyncio.AbstractEventLoop) -> None:
    async def end() -> None:
        for session in sessions:
            await session.close()
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)


async def _call_own(name: str, session: McpSession, /, **arguments: Any) -> str:
    return await session.call(name, arguments)


def _command(address: str) -> tuple[str, ...]:
    """Returns the command of an address; empty for a URL."""
    kind, _, rest = address.partition(":")
    if kind in ("http", "https") and rest.startswith("//"):
        return ()
    try:
        command = tuple(shlex.split(rest)) if kind == "stdio" else ()
    except ValueError as error:
        raise ValueError(f"the command of {address!r} cannot be read: {error}") from error
    if not command:
        raise ValueError(f"mcp takes 'stdio:command arguments' or 'http://host/path', got {address!r:.200}")
    return command


async def _list(server: McpServer) -> Schemas:
    session = McpSession(server)
    try:
        return await session.schemas()
    finally:
        await session.close()


@asynccontextmanager
async def _connected(server: McpServer) -> AsyncIterator[Any]:
    """Starts the server, or connects to it, and yields the session."""
    from mcp import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    async with AsyncExitStack() as stack:
        if server.command:
            program, *arguments = server.command
            parameters = StdioServerParameters(command=program, args=arguments, env=dict(server.environment))
            nowhere = stack.enter_context(Path(os.devnull).open("w"))  # noqa: SIM115 - the stack closes it
            streams = await stack.enter_async_context(stdio_client(parameters, errlog=nowhere))
        else:
            streams = await stack.enter_async_context(streamable_http_client(server.address))
        session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
        await session.initialize()
        yield session


async def _schemas(server: McpServer, session: Any) -> Schemas:
    """Returns the schemas of a server's tools by name, in the order of the names."""
    from mcp.types import PaginatedRequestParams

    found: list[dict[str, Any]] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        fields = page.model_dump(by_alias=True)
        found += fields["tools"]
        cursor = fields.get("nextCursor")
        if cursor is None:
            break
    else:
        logger.warning("%s has more than %d pages of tools; those of the first are used", server.address, MOST_PAGES)
    schemas: dict[str, dict[str, Any]] = {}
    for each in sorted(found, key=lambda each: each["name"]):
        if each["name"] in schemas:
            raise ValueError(f"{server.address} has two tools of the name {short_repr(each['name'])}; rename one")
        schemas[each["name"]] = remote_schema(
            server.address, each["name"], each.get("description"), each.get("inputSchema")
        )
    if not schemas:
        raise ValueError(f"{server.address} has no tools")
    return schemas


def _text_of(result: Any) -> str:
    """Returns the texts of a result."""
    found = result.model_dump(by_alias=True, mode="json")
    parts = [
        part["text"] if part.get("type") == "text" else f"[{part.get('type')}]" for part in found.get("content") or ()
    ]
    text = "\n".join(parts)
    if found.get("isError"):
        raise ToolError(text or "the tool failed")
    return text


def _failure(server: McpServer, error: BaseException) -> Exception:
    from pydantic import ValidationError

    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ValidationError):  # of the library's types, whose message has several lines
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        return ValueError(f"{server.address} has sent what the protocol does not allow: {where}: {fault['msg']}")
    if isinstance(error, ValueError):
        return error
    text = error_line(error) or type(error).__name__
    why = f"no answer within {server.connect_timeout_s:g} s" if isinstance(error, TimeoutError) else text
    return InfrastructureError(f"{server.address} cannot be reached: {why}")


_said: set[tuple[str, int]] = set()


def _say_once(record: logging.LogRecord) -> bool:
    """Keeps the first of each warning of the library, which warns of each line that a server sends, as one line."""
    place = record.pathname, record.lineno
    if record.levelno < logging.WARNING or "mcp" not in Path(record.pathname).parts:
        return True
    record.msg = f"{one_line(record.getMessage())[:300]} (a server of MCP; this is said once)"
    record.args, record.exc_info, record.exc_text = (), None, None
    is_new = place not in _said
    _said.add(place)
    return is_new


def remote_schema(source: str, name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Returns the schema of a server's tool in OpenAI's format."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"{source} has a tool with the name {short_repr(name)}; names of tools have up to 64 letters, digits, _, . "
            "and -"
        )
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ValueError(
            f"{source}: the arguments of {name!r} must have a schema of an object, {short_repr(parameters)}"
        )
    schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": printable(description) if isinstance(description, str) else "",
            "parameters": {"type": "object", "properties": {}, **parameters},
        },
    }
    size = len(json.dumps(schema))
    if size > LONGEST_SCHEMA:
        raise ValueError(
            f"{source}: the description of the tool {name!r} has {size:,} characters, {LONGEST_SCHEMA:,} fit"
        )
    return schema
