"""The server of the page."""

import socket
import threading
from collections.abc import Callable

import uvicorn

from groupax.view.app import Page, make_app
from groupax.view.guard import Guard
from groupax.view.runs import Runs


def make_server(runs: Runs, port: int, token: str | None) -> tuple[uvicorn.Server, Page]:
    """Returns a server that has not started, and the page that it serves, which must be closed after it.

    Args:
        runs: The runs to show.
        port: Port at which it will listen.
        token: Token that requests must have; None for servers on the loopback.
    """
    app, page = make_app(runs)
    threading.Thread(target=runs.refresh, daemon=True).start()  # long logs are read before the page asks
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


def serve(runs: Runs, listening: socket.socket, host: str, token: str | None, tell: Callable[[str], object]) -> None:
    """Serves until it is interrupted.

    Args:
        runs: The runs to show.
        listening: Socket that receives requests.
        host: Host of the address that is printed.
        token: Token that requests must have; None for servers on the loopback.
        tell: Function that receives the address.
    """
    port = listening.getsockname()[1]
    server, page = make_server(runs, port, token)
    named = f"[{host}]" if ":" in host else host
    shown = {"0.0.0.0": socket.gethostname(), "[::]": socket.gethostname()}.get(named, named)
    tell(f"groupax view: http://{shown}:{port}/{f'?token={token}' if token else ''}   (Ctrl-C stops it)")
    try:
        server.run(sockets=[listening])
    finally:
        page.close()
