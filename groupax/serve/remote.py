"""A server, as its clients see it. Needs no server software."""

import http.client
import json
import threading
import urllib.parse
import weakref
from contextlib import closing
from http import HTTPStatus
from typing import Any


class Refused(Exception):  # noqa: N818 - not always an error
    """An answer other than 200.

    Args:
        status: of HTTP.
        message: what the server says.
        code: of its error object.
    """

    def __init__(self, status: int, message: str, code: str | None) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.code = status, code


class Remote:
    """A server, and what is known of the weights that it has.

    Args:
        url: as http://host:port.
        api_key: of the server; None if it needs none.
        timeout_s: the longest that it may take for an answer.

    Attributes:
        state, version: of its weights after the last push, as it calls them; None if others may be there.
        pushed: which of our weights these are.
        leaves: their arrays, as far as they still exist.
        lock: held by who pushes.
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
        """A connection that is not open yet."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None, "checked"
        return kind(self._parts.hostname, self._parts.port, timeout=self._timeout_s)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        connection: http.client.HTTPConnection | None = None,
        **headers: str,
    ) -> Any:
        """The answer to a request, {} if it is empty.

        Args:
            method: of HTTP.
            path: on the server.
            body: an object, or bytes in parts.
            connection: an open one; None for one of its own.
            headers: further ones, with _ for -.

        Raises:
            Refused: the server says no.
            OSError, http.client.HTTPException: there was no whole answer.
        """
        if connection is None:
            with closing(self.connection()) as own:
                return self.ask(method, path, body, own, **headers)
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
            answer = json.loads(text) if text else {}
        except ValueError as error:
            if status != HTTPStatus.OK:  # what stands before the server, as a proxy
                raise Refused(status, text[:200].decode(errors="replace"), None) from error
            raise http.client.HTTPException(f"{self.url}{path} answers {status} with no JSON") from error
        if status != HTTPStatus.OK:
            told = answer.get("error", answer) if isinstance(answer, dict) else answer
            told = told if isinstance(told, dict) else {"message": told}
            code = told.get("code")
            raise Refused(status, str(told.get("message", answer)), code if isinstance(code, str) else None)
        return answer
