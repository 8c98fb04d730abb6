"""A connection to a server for its clients. Needs no server packages."""

import http.client
import json
import threading
import urllib.parse
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from typing import Any

from groupax.errors import RunError


class RefusedError(Exception):
    """A response with a status other than 200.

    Args:
        status: HTTP status.
        message: The server's message.
        code: Code of its error object.
    """

    def __init__(self, status: int, message: str, code: str | None) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.code = status, code


@contextmanager
def reading(url: str, what: str) -> Iterator[None]:
    """Reads a response within the block.

    Raises:
        RunError: The response has another form.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{url} responds without {what} ({error!r}); is it the right server, and new enough?") from error


class RemoteServer:
    """A server, and which weights it has.

    Args:
        url: Address as http://host:port.
        api_key: Key of the server; None if it needs none.
        timeout_s: Longest time to wait for a response.

    Attributes:
        state, version: Its name and version of its weights after the last push; None if it may have others.
        pushed: Our version of these weights.
        leaves: Their arrays, as far as they still exist.
        lock: Held during a push.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a server must be given as http://host:port, got {url!r}")
        self.url, self._parts, self._api_key, self._timeout_s = url, parts, api_key, timeout_s
        self.state: str | None = None
        self.version = self.pushed = -1
        self.leaves: list[weakref.ref[Any]] = []
        self.lock = threading.Lock()

    def connection(self) -> http.client.HTTPConnection:
        """Returns a connection that is not open yet."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None, "checked"
        return kind(self._parts.hostname, self._parts.port, timeout=self._timeout_s)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        connection: http.client.HTTPConnection | None = None,
        **headers: str,
    ) -> Any:
        """Sends a request and returns the JSON of its response, {} if that is empty.

        Args:
            method: HTTP method.
            path: Path on the server.
            body: An object, or a list of bytes.
            connection: An open connection; None opens one for this request.
            headers: Further headers, with _ for -.

        Raises:
            RefusedError: the server refuses.
            OSError, http.client.HTTPException: there was no complete response.
        """
        if connection is None:
            with closing(self.connection()) as own:
                return self.request(method, path, body, own, **headers)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self._api_key is not None:
            sent["authorization"] = f"Bearer {self._api_key}"
        if isinstance(body, list):
            sent["content-length"] = str(sum(map(len, body)))
        elif body is not None:
            body = json.dumps(body).encode()
            sent["content-type"] = "application/json"
        connection.request(method, self._parts.path.rstrip("/") + path, body, sent)
        with connection.getresponse() as response:
            status, text = response.status, response.read()
        try:
            received = json.loads(text) if text else {}
        except ValueError as error:
            if status != HTTPStatus.OK:  # for example a proxy's page
                raise RefusedError(status, text[:200].decode(errors="replace"), None) from error
            raise http.client.HTTPException(f"the response of {self.url}{path} ({status}) is not JSON") from error
        if status != HTTPStatus.OK:
            fault = received.get("error", received) if isinstance(received, dict) else received
            fault = fault if isinstance(fault, dict) else {"message": fault}
            code = fault.get("code")
            raise RefusedError(status, str(fault.get("message", received)), code if isinstance(code, str) else None)
        return received
