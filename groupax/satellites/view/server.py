"""The HTTP server of the page, and who may ask it."""

import hmac
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.responses import PlainTextResponse, Response

from groupax.parallel.processes import is_loopback
from groupax.satellites.view.export import make_app
from groupax.satellites.view.runs import Runs
from groupax.serve.web import foreign_page, hostname, several_hosts

HEADERS = {
    # Scripts, styles and data come from this server only, and text never becomes markup.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


READ_S = 0.1  # of reading long logs at the start, and of each pause between, in which requests are answered


class Guard:
    """An ASGI middleware that refuses requests which the server's own page does not make.

    * Without a token, only requests to a loopback host are answered. This blocks other names that resolve to the
      loopback (DNS rebinding).
    * Requests from pages of another origin are refused, except for following a link to the page itself.
    * With a token, a request must have it in the cookie that the first response sets, in `Authorization: Bearer`, or in
      `?token=`.

    Args:
        app: Application to protect.
        token: Token that requests must have; None for servers on the loopback.
        port: Port of the server, part of the cookie's name because all ports of a host share cookies.
    """

    def __init__(self, app: Any, token: str | None, port: int) -> None:
        self.app, self.token = app, token
        self.cookie = f"groupax_view_{port}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles an ASGI request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        host, response = headers.get("host", ""), None
        if refusal := several_hosts(scope["headers"]):
            response = PlainTextResponse(f"groupax view: {refusal}\n", 400)
        elif refusal := self._refusal(scope, headers, host):
            response = PlainTextResponse(f"groupax view: {refusal}\n", 403)
        elif self.token is not None and self._is_token(given):
            cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            response = Response(status_code=303, headers={"location": "/", "set-cookie": cookie})
        elif self.token is not None and not self._has_token(headers):
            refusal = "this page requires a token: open the URL that groupax view printed"
            response = PlainTextResponse(f"groupax view: {refusal}\n", 401)
        if response is not None:
            response.headers["cache-control"] = "no-store"

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        await (response or self.app)(scope, receive, with_headers)

    def _refusal(self, scope: Any, headers: Mapping[str, str], host: str) -> str:
        """Returns why a request is refused; empty if it is not."""
        if self.token is None and not is_loopback(hostname(host)):
            return f"the host {host[:200]!r} is not this machine's loopback; use --host to serve other machines"
        if scope["method"] not in ("GET", "HEAD"):
            return f"{scope['method']} is refused: the server is read-only"
        return foreign_page(headers, may_be_linked=scope["path"] == "/")

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(value.strip()):
            return True
        cookies = (each.strip().partition("=") for each in headers.get("cookie", "").split(";"))
        return any(name == self.cookie and self._is_token(value) for name, _, value in cookies)

    def _is_token(self, text: str) -> bool:
        return self.token is not None and hmac.compare_digest(text.encode(), self.token.encode())


def make_server(runs: Runs, port: int, token: str | None) -> uvicorn.Server:
    """Returns a server that is not running yet.

    Args:
        runs: Runs to show.
        port: Port that the server will listen on.
        token: Token that requests must have; None for servers on the loopback.
    """
    threading.Thread(target=_read_all, args=(runs,), daemon=True).start()  # starts before the first request
    config = uvicorn.Config(
        Guard(make_app(runs), token, port),
        http="h11",  # limits headers
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def _read_all(runs: Runs) -> None:
    """Reads long logs a part at a time; requests are answered with what is read so far."""
    while not runs.refresh(READ_S):
        time.sleep(READ_S)


def serve(runs: Runs, listening: socket.socket, host: str, token: str | None) -> None:
    """Serves the page until it is interrupted, and prints its URL.

    Args:
        runs: Runs to show.
        listening: Listening socket.
        host: Host in the printed URL.
        token: Token that requests must have; None for servers on the loopback.
    """
    port = listening.getsockname()[1]
    server = make_server(runs, port, token)
    named = f"[{host}]" if ":" in host else host
    shown = {"0.0.0.0": socket.gethostname(), "[::]": socket.gethostname()}.get(named, named)
    print(f"groupax view: http://{shown}:{port}/{f'?token={token}' if token else ''}   (Ctrl-C to stop)", flush=True)
    server.run(sockets=[listening])
