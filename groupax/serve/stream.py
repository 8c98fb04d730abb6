"""Streamed responses, and what interrupts responses: errors, deadlines, disconnected clients."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from groupax.serve.errors import ApiError
from groupax.serve.protocols.table import Protocol

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx's status for disconnected clients, which metrics count


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

        work = None
        try:
            head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(head)
            work = asyncio.ensure_future(send_events())
            try:
                await unless_disconnected(work, receive, self._deadline_s)
                await send_body(self._protocol.end, more=False)
            except (ClientDisconnect, OSError):
                raise
            except Exception as error:  # noqa: BLE001 - sent, and logged
                api_error = as_api_error(error, scope)
                self.status_code = api_error.status
                event = self._protocol.error_event(api_error)
                await send_body(self._protocol.encode_event(event), more=False)
        except (ClientDisconnect, OSError):
            self.status_code = CLIENT_GONE
        finally:
            if work is not None:
                work.cancel()
            self._cancel()
            self.on_end()


async def unless_disconnected(work: "asyncio.Future[Any]", receive: Receive, deadline_s: float) -> Any:
    """Returns the result of the work.

    Raises:
        ClientDisconnect: the client disconnects first.
        ApiError: the deadline comes first.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(disconnected())
    try:
        timeout_s = deadline_s - time.monotonic()
        await asyncio.wait({work, watch}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if watch.done():
            raise ClientDisconnect
        raise timeout_error()
    finally:
        watch.cancel()


def timeout_error() -> ApiError:
    """Returns the error of a request that has taken too long."""
    headers = {"x-should-retry": "false"}  # a retry would only add to the load
    return ApiError(504, "the request took longer than this server allows", code="timeout", headers=headers)


def as_api_error(error: Exception, scope: Scope) -> ApiError:
    """Returns an error as the client sees it; logs unexpected ones."""
    if isinstance(error, ApiError):
        return error
    logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    return ApiError(500, "an error inside the server; its log says more")
