"""How weights lie in an upload: what stands in a safetensors file behind its header, sent in pieces. Imports no jax.

A manifest is such a header: {name: {"dtype": "F32", "shape": [..], "data_offsets": [first, end]}}. Pieces are ranges of
the bytes behind it, all of one size but the last; each comes with its CRC-32.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

PIECE_BYTES = 16 << 20
MAX_PIECE_BYTES = 64 << 20
DTYPES: dict[str, Any] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Attributes:
        dtype: a name in `DTYPES`.
        shape: of the tensor.
        first: of its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    first: int

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.first + math.prod(self.shape) * DTYPES[self.dtype].itemsize


def manifest_of(tensors: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """The manifest of tensors that lie one behind another.

    Raises:
        ValueError: a tensor is of a dtype that does not travel.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    manifest, first = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in names:
            raise ValueError(f"{name} is of dtype {tensor.dtype}; weights travel as {', '.join(map(str, names))}")
        end = first + tensor.nbytes
        manifest[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
        first = end
    return manifest


def read_manifest(manifest: Any) -> dict[str, Place]:
    """The places that a manifest says.

    Raises:
        ValueError: it is none, or its tensors do not lie one behind another.
    """
    if not isinstance(manifest, dict) or not manifest:
        raise ValueError("tensors must be an object of names and {dtype, shape, data_offsets}, at least one")
    places, end = {}, 0
    for name, entry in manifest.items():
        dtype, shape, offsets = (
            (entry.get(key) for key in ("dtype", "shape", "data_offsets")) if isinstance(entry, dict) else (None,) * 3
        )
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{name}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"{name}: shape must be a list of sizes, got {shape!r}")
        places[name] = Place(dtype, tuple(shape), end)
        end = places[name].end
        if offsets != [places[name].first, end]:
            raise ValueError(f"{name}: data_offsets must be {[places[name].first, end]}, got {offsets!r}")
    return places


def tensors_in(data: np.ndarray, places: Mapping[str, Place]) -> dict[str, np.ndarray]:
    """The tensors that lie in bytes, without a copy."""
    return {
        name: data[place.first : place.end].view(DTYPES[place.dtype]).reshape(place.shape)
        for name, place in places.items()
    }


def pieces_of(tensors: Mapping[str, np.ndarray], size: int = PIECE_BYTES) -> Iterator[tuple[list[memoryview], int]]:
    """The pieces of tensors that lie one behind another: parts of the tensors' own memory, and their CRC-32."""
    parts: list[memoryview] = []
    room = size
    for tensor in tensors.values():
        rest = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
        while len(rest):
            part, rest = rest[:room], rest[room:]
            parts.append(part)
            room -= len(part)
            if room == 0:
                yield parts, checksum(parts)
                parts, room = [], size
    if parts:
        yield parts, checksum(parts)


def checksum(parts: list[memoryview]) -> int:
    """The CRC-32 of bytes that lie in parts."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc
