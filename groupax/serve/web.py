"""Parts that all HTTP endpoints share: errors in OpenAI's format, checks of callers, bodies and deadlines."""

import asyncio
import hmac
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from groupax.parallel.processes import is_loopback

logger = logging.getLogger(__name__)

# Types of errors that are neither the request's fault nor the server's.
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}
CLIENT_GONE = 499  # nginx's status for disconnected clients, which metrics count
MAX_DRAIN_RATIO = 16  # a body of up to this many times the limit is read, so that its sender gets a response


class ApiError(Exception):
    """A request that is refused or cannot be finished. What reads requests raises it.

    Args:
        status: HTTP status.
        message: What is wrong, the values, and what to do.
        param: Name of the request's field.
        code: Machine-readable cause, as "model_not_found".
        headers: Headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = self.message.encode(errors="backslashreplace").decode()  # it may quote half of a surrogate pair
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


@contextmanager
def bad_request(param: str | None = None, what: str = "", code: str | None = None) -> Iterator[None]:
    """Raises a `ValueError` of the block as an `ApiError`, whose message begins with `what`."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, f"{what}{error}", param, code) from error


def timeout_error() -> ApiError:
    """Returns the error of a request that has taken too long, which clients do not repeat."""
    headers = {"x-should-retry": "false"}
    return ApiError(504, "the request took longer than this server allows", code="timeout", headers=headers)


def as_api_error(error: Exception, scope: Scope) -> ApiError:
    """Returns an error as the client sees it; logs unexpected ones."""
    if isinstance(error, ApiError):
        return error
    logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    return ApiError(500, "an error inside the server; its log says more")


def check_key(headers: Mapping[str, str], keys: Iterable[str]) -> None:
    """Refuses a request without one of these keys, where clients of OpenAI or of Anthropic send theirs."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    given = (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip().encode()
    if not given or not any(hmac.compare_digest(given, each.encode()) for each in keys):
        message = "the API key is missing or wrong; send 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class CallerCheck:
    """Refuses requests that a page of another site makes through the user's browser, on a server without keys.

    Every page in the user's browser can reach a server on the loopback: a form or a script of any site may post to it,
    and a name of that site which suddenly resolves to 127.0.0.1 (DNS rebinding) lets the page read the responses too.

    * `Host` must be an address, the loopback, a name of this machine (unless the server is bound to the loopback), or
      one of the allowed names. A page that reaches this server by DNS rebinding uses a name of its own.
    * A browser's request must come from a page of the same origin, which `Origin` and `Sec-Fetch-Site` show.
    """

    def __init__(self, host: str, allowed_hosts: Iterable[str] = ()) -> None:
        self._is_local = is_loopback(host)
        own = [] if self._is_local else [host, socket.gethostname(), socket.getfqdn()]
        self._names = {name.lower().strip("[]") for name in (*own, *allowed_hosts)}

    def refusal(self, headers: Mapping[str, str]) -> str:
        """Returns why a request with these headers (names in lower case) is refused; empty if it is not."""
        host = headers.get("host", "")
        name = hostname(host)
        if not (is_loopback(name) or name in self._names or (not self._is_local and _is_address(name))):
            return (
                f"the host {host[:200]!a} is not a name of this server, which has no keys; use its address, or start "
                "it with --allowed_hosts or --api_key"
            )
        return foreign_page(headers)


def hostname(host: str) -> str:
    """Returns the name or the address in a `Host` header, without its port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def foreign_page(headers: Mapping[str, str], may_be_linked: bool = False) -> str:
    """Returns why a request is attributed to another site's page; empty if it is not.

    Args:
        headers: Headers of the request, with names in lower case.
        may_be_linked: Whether other sites may link to this address.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return f"requests of another origin ({origin[:200]!a}) are refused"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        follows_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if not (follows_link and may_be_linked):
            return "requests of other sites are refused"
    return ""


def several_hosts(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Returns why a request with several `Host` headers is refused; empty if it has at most one."""
    num = sum(name.lower() == b"host" for name, _ in headers)
    return f"the request has {num} Host headers; HTTP allows one" if num > 1 else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def json_body(http: Request, limit: int, timeout_s: float | None = None) -> bytes:
    """Returns the body of a request in JSON."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"the content-type is {kind[:80]!a}; send 'content-type: application/json' "
        message += "(with curl: -H 'content-type: application/json')"
        raise ApiError(415, message, code="unsupported_media_type")
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in http.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                elif size > MAX_DRAIN_RATIO * limit:
                    break
    except TimeoutError as error:
        message = f"the body did not arrive within {timeout_s:g} s"
        raise ApiError(408, message, code="timeout", headers={"connection": "close"}) from error
    if size > limit:
        raise ApiError(413, f"the body has more than {limit} bytes, which is the most that this server takes")
    return b"".join(parts)


async def unless_disconnected(coroutine: Awaitable[Any], receive: Receive, deadline_s: float) -> Any:
    """Returns the result of a coroutine, which is cancelled at the deadline.

    Raises:
        ClientDisconnect: The client disconnects first.
        ApiError: The deadline, by `time.monotonic`, comes first.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work, watch = asyncio.ensure_future(coroutine), asyncio.ensure_future(disconnected())
    try:
        timeout_s = deadline_s - time.monotonic()
        await asyncio.wait({work, watch}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if watch.done():
            raise ClientDisconnect
        raise timeout_error()
    finally:
        work.cancel()
        watch.cancel()
