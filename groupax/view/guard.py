"""Access control of the server, and the security headers of its responses."""

import hmac
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from groupax.parallel.processes import is_loopback
from groupax.serve.cross_origin import foreign_page, hostname

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
        refusal = refusal_of(scope["method"], scope["path"], headers, self.token is None)
        if refusal:
            await _answer(send, 403, refusal)
            return
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if self.token is not None and not self._is_token(given) and not self._has_token(headers):
            await _answer(send, 401, "this page requires a token: open the URL that groupax view printed")
            return
        if self.token is not None and self._is_token(given):
            cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            await _answer(send, 303, "", {"location": "/", "set-cookie": cookie})
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_encoded(HEADERS)]
            await send(message)

        await self.app(scope, receive, with_headers)

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(value.strip()):
            return True
        cookies = (each.strip().partition("=") for each in headers.get("cookie", "").split(";"))
        return any(name == self.cookie and self._is_token(value) for name, _, value in cookies)

    def _is_token(self, text: str) -> bool:
        return self.token is not None and hmac.compare_digest(text.encode(), self.token.encode())


def refusal_of(method: str, path: str, headers: Mapping[str, str], loopback_only: bool) -> str:
    """Returns why a request is refused; empty if it is not."""
    host = headers.get("host", "")
    if loopback_only and not is_loopback(hostname(host)):
        return f"the host {host[:200]!r} is not this machine's loopback; use --host to serve other machines"
    if method not in ("GET", "HEAD"):
        return f"{method} is refused: the server is read-only"
    return foreign_page(headers, may_be_linked=path == "/")


def new_token() -> str:
    """Returns a token of 256 random bits."""
    return secrets.token_urlsafe(32)


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def _answer(send: Any, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
    body = f"groupax view: {text}\n".encode() if text else b""
    plain = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), "cache-control": "no-store"}
    encoded = _encoded({**plain, **HEADERS, **(headers or {})})
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
