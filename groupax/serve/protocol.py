"""The layout of uploaded weights: the data of a safetensors file, sent in pieces. Imports no jax.

A manifest is such a file's header: {name: {"dtype": "F32", "shape": [..], "data_offsets": [start, end]}}. Pieces are
ranges of the bytes after it, all of one size but the last; each is sent with its CRC-32.
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
class Extent:
    """The bytes of a tensor in an upload.

    Attributes:
        dtype: A name in `DTYPES`.
        shape: Shape of the tensor.
        start: Offset of its first byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """Offset after the last byte of the tensor."""
        return self.start + math.prod(self.shape) * DTYPES[self.dtype].itemsize


def manifest_of(tensors: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Returns the manifest of concatenated tensors.

    Raises:
        ValueError: a tensor has a dtype that cannot be uploaded.
    """
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
        ValueError: it is not a manifest, or its tensors are not adjacent.
    """
    if not isinstance(manifest, dict) or not manifest:
        raise ValueError("tensors must be an object of names and {dtype, shape, data_offsets}, at least one")
    extents, end = {}, 0
    for name, entry in manifest.items():
        dtype, shape, offsets = (
            (entry.get(key) for key in ("dtype", "shape", "data_offsets")) if isinstance(entry, dict) else (None,) * 3
        )
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


def pieces_of(tensors: Mapping[str, np.ndarray], size: int = PIECE_BYTES) -> Iterator[tuple[list[memoryview], int]]:
    """Yields the pieces of concatenated tensors, as views of their memory, and the CRC-32 of each piece."""
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
    """Returns the CRC-32 of concatenated parts."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc
