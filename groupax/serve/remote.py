"""Connections to servers, and the files that weights are sent to them in. Needs no server packages, no jax."""

import http.client
import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http import HTTPStatus
from typing import Any

import ml_dtypes
import numpy as np

from groupax.core.errors import RunError

DTYPES: dict[str, Any] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class RefusedError(Exception):
    """A response with a status other than 200, with the server's message and the code of its error object."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.code = status, code


@contextmanager
def reading(url: str, what: str) -> Iterator[None]:
    """Raises a `RunError` if the response that the block reads has another form."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{url} responds without {what} ({error!r}); is it the right server, and new enough?") from error


class RemoteServer:
    """A server that can be reached.

    Args:
        url: Address as http://host:port.
        api_key: Key of the server; None if it needs none.
        timeout_s: Longest time to wait for a response.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a server must be given as http://host:port, got {url!r}")
        self.url, self._parts, self._api_key, self._timeout_s = url, parts, api_key, timeout_s
        self.lock = threading.Lock()  # held while it receives weights

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
    ) -> Any:
        """Sends a request and returns the JSON of its response, {} if that is empty.

        Args:
            method: HTTP method.
            path: Path on the server.
            body: An object, or a list of bytes.
            connection: An open connection; None opens one for this request.

        Raises:
            RefusedError: The server refuses.
            OSError, http.client.HTTPException: There was no complete response.
        """
        if connection is None:
            with closing(self.connection()) as own:
                return self.request(method, path, body, own)
        sent = {}
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
                raise RefusedError(status, text[:200].decode(errors="replace")) from error
            raise http.client.HTTPException(f"the response of {self.url}{path} ({status}) is not JSON") from error
        if status != HTTPStatus.OK:
            fault = received.get("error", received) if isinstance(received, dict) else received
            fault = fault if isinstance(fault, dict) else {"message": fault}
            code = fault.get("code")
            raise RefusedError(status, str(fault.get("message", received)), code if isinstance(code, str) else None)
        return received


def bytes_of(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """Returns a safetensors file of tensors, without copies of those that are contiguous.

    Raises:
        ValueError: A tensor has a dtype that cannot be uploaded.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in names:
            raise ValueError(f"{name} has dtype {tensor.dtype}; weights are sent as {', '.join(map(str, names))}")
        end = start + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)  # so that tensors are aligned, as the safetensors library does
    data = [np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data for tensor in tensors.values()]
    return [len(written).to_bytes(8, "little"), written, *data]


def read_bytes(data: np.ndarray) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Returns the metadata and the tensors of a safetensors file [bytes] in memory, without a copy.

    Raises:
        ValueError: It is not such a file, or has other dtypes than `DTYPES`.
    """
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    try:
        header = json.loads(data[8:begin].tobytes())
        metadata, tensors = dict(header.pop("__metadata__", {})), {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            stored = data[begin + start : begin + end].view(DTYPES[entry["dtype"]])
            tensors[name] = stored.reshape(entry["shape"])
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        names = ", ".join(DTYPES)
        raise ValueError(f"the body is not a safetensors file with the dtypes {names}: {error!r:.200}") from error
    return metadata, tensors
