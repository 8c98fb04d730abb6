"""Connections to servers, and the layout of weights that are uploaded to them. Needs no server packages, no jax.

Weights are sent as the data of a safetensors file. The manifest is such a file's header: {name: {"dtype": "F32",
"shape": [..], "data_offsets": [start, end]}}.
"""

import http.client
import json
import math
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Extent:
    """The bytes of a tensor in an upload: its dtype (a name in `DTYPES`), its shape, and where they begin."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """Offset after the last byte of the tensor."""
        return self.start + math.prod(self.shape) * DTYPES[self.dtype].itemsize


def manifest_of(tensors: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Returns the manifest of concatenated tensors, or raises a `ValueError` for a dtype that cannot be uploaded."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    manifest, start = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in names:
            raise ValueError(f"{name} has dtype {tensor.dtype}; weights are sent as {', '.join(map(str, names))}")
        end = start + tensor.nbytes
        manifest[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    return manifest


def read_manifest(manifest: Any) -> dict[str, Extent]:
    """Returns the extents of the tensors in a manifest.

    Raises:
        ValueError: It is not a manifest, or its tensors are not adjacent.
    """
    if not isinstance(manifest, dict) or not manifest:
        raise ValueError("tensors must be an object of names and {dtype, shape, data_offsets}, at least one")
    extents, end = {}, 0
    for name, entry in manifest.items():
        entry = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{name}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"{name}: shape must be a list of sizes, got {shape!r}")
        extents[name] = Extent(dtype, tuple(shape), end)
        end = extents[name].end
        if offsets != [extents[name].start, end]:
            raise ValueError(f"{name}: data_offsets must be {[extents[name].start, end]}, got {offsets!r}")
    return extents


def tensors_in(data: np.ndarray, extents: Mapping[str, Extent]) -> dict[str, np.ndarray]:
    """Returns the tensors in uploaded bytes, without a copy."""
    return {
        name: data[extent.start : extent.end].view(DTYPES[extent.dtype]).reshape(extent.shape)
        for name, extent in extents.items()
    }


def bytes_of(tensors: Mapping[str, np.ndarray]) -> list[memoryview]:
    """Returns the bytes of tensors, without copies of those that are contiguous."""
    return [np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data for tensor in tensors.values()]
