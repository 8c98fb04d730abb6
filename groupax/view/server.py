"""The HTTP server of the page."""

import math
import socket
import threading
import time
from typing import Any

import uvicorn

from groupax.view.app import Page, make_app
from groupax.view.guard import Guard
from groupax.view.runs import Runs

READ_S = 0.1  # of reading long logs at the start, until the next look whether somebody waits for an answer
QUIET_S = 0.3  # without a request, after which a page has what it needs
LONGEST_WAIT_S = 2.0  # of the reader for its turn


class Visits:
    """An ASGI middleware that tells whether somebody waits for an answer, or has just received one."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._num_open, self._last_s = 0, -math.inf

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles an ASGI request."""
        self._num_open += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._num_open -= 1
            self._last_s = time.monotonic()

    def wait_for_quiet(self) -> None:
        """Returns when nobody has asked for a moment, at the latest after `LONGEST_WAIT_S`."""
        until_s = time.monotonic() + LONGEST_WAIT_S
        while (self._num_open or time.monotonic() < self._last_s + QUIET_S) and time.monotonic() < until_s:
            time.sleep(0.02)


def make_server(runs: Runs, port: int, token: str | None) -> tuple[uvicorn.Server, Page]:
    """Returns a server that is not running yet, and its request handlers, which the caller closes after it.

    Args:
        runs: Runs to show.
        port: Port that the server will listen on.
        token: Token that requests must have; None for servers on the loopback.
    """
    app, page = make_app(runs)
    visits = Visits(Guard(app, token, port))
    threading.Thread(target=_read_all, args=(runs, visits), daemon=True).start()  # starts before the first request
    config = uvicorn.Config(
        visits,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config), page


def _read_all(runs: Runs, visits: Visits) -> None:
    """Reads long logs a part at a time; requests go first, and are answered with what is read so far."""
    while not runs.refresh(READ_S):
        visits.wait_for_quiet()


def serve(runs: Runs, listening: socket.socket, host: str, token: str | None) -> None:
    """Serves the page until it is interrupted, and prints its URL.

    Args:
        runs: Runs to show.
        listening: Listening socket.
        host: Host in the printed URL.
        token: Token that requests must have; None for servers on the loopback.
    """
    port = listening.getsockname()[1]
    server, page = make_server(runs, port, token)
    named = f"[{host}]" if ":" in host else host
    shown = {"0.0.0.0": socket.gethostname(), "[::]": socket.gethostname()}.get(named, named)
    print(f"groupax view: http://{shown}:{port}/{f'?token={token}' if token else ''}   (Ctrl-C to stop)", flush=True)
    try:
        server.run(sockets=[listening])
    finally:
        page.close()
