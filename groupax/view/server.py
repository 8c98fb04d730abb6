"""The HTTP server of the page."""

import socket
import threading
import time

import uvicorn

from groupax.view.app import Page, make_app
from groupax.view.guard import Guard
from groupax.view.runs import Runs

READ_S, PAUSE_S = 0.5, 0.02  # of reading long logs at the start, and between such times


def make_server(runs: Runs, port: int, token: str | None) -> tuple[uvicorn.Server, Page]:
    """Returns a server that is not running yet, and its request handlers, which the caller closes after it.

    Args:
        runs: Runs to show.
        port: Port that the server will listen on.
        token: Token that requests must have; None for servers on the loopback.
    """
    app, page = make_app(runs)
    threading.Thread(target=_read_all, args=(runs,), daemon=True).start()  # starts before the first request
    config = uvicorn.Config(
        Guard(app, token, port),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config), page


def _read_all(runs: Runs) -> None:
    """Reads long logs a part at a time, so that requests in between are answered with what is read so far."""
    while not runs.refresh(READ_S):
        time.sleep(PAUSE_S)


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
