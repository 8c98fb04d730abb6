"""Answers that come in pieces, and what ends them: errors, deadlines, clients that are gone."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from groupax.serve.errors import ApiError

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # for the counts; nobody is there to read it


class EventStream(Response):
    """Server-sent events, one per object, and "[DONE]"; an error in between is told as one.

    Args:
        events: the objects.
        cancel: called when the client is gone, is too slow, or the time is over; and at the end.
        deadline_s: by `time.monotonic`.
        send_timeout_s: the longest that the client may take nothing.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        cancel: Callable[[], None],
        deadline_s: float,
        send_timeout_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._cancel = events, cancel
        self._deadline_s, self._send_timeout_s = deadline_s, send_timeout_s
        self.ended: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them, as an ASGI application."""

        async def put(message: dict[str, Any]) -> None:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        async def put_text(text: str, more: bool = True) -> None:
            await put({"type": "http.response.body", "body": text.encode(), "more_body": more})

        async def put_events() -> None:
            async for event in self._events:
                await put_text(f"data: {json.dumps(event)}\n\n")

        work = None
        try:
            await put({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            work = asyncio.ensure_future(put_events())
            try:
                await unless_gone(work, receive, self._deadline_s)
                await put_text("data: [DONE]\n\n", more=False)
            except (ClientDisconnect, OSError):
                raise
            except Exception as error:  # noqa: BLE001 - told, and in the log
                fault = fault_of(error, scope)
                self.status_code = fault.status
                await put_text(f"data: {json.dumps(fault.body)}\n\n", more=False)
        except (ClientDisconnect, OSError):  # a timeout is one
            self.status_code = CLIENT_GONE  # the connection is closed when nothing more comes
        finally:
            if work is not None:
                work.cancel()
            self._cancel()
            self.ended()


async def unless_gone(work: "asyncio.Future[Any]", receive: Receive, deadline_s: float) -> Any:
    """The result of the work.

    Raises:
        ClientDisconnect: the client is gone first.
        ApiError: the time is over first.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        timeout_s = deadline_s - time.monotonic()
        await asyncio.wait({work, watch}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if watch.done():
            raise ClientDisconnect
        raise too_late()
    finally:
        watch.cancel()


def too_late() -> ApiError:
    """Returns the error of a request that has taken too long."""
    headers = {"x-should-retry": "false"}  # a client that tried again would only add to the load
    return ApiError(504, "the request took longer than this server allows", code="timeout", headers=headers)


def fault_of(error: Exception, scope: Scope) -> ApiError:
    """What a client is told of an error; one that nobody expected goes into the log."""
    if isinstance(error, ApiError):
        return error
    logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    return ApiError(500, "an error inside the server; its log says more")
