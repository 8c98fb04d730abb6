"""Values of Arrow scalars: texts, bytes and lists."""

from typing import Any

import numpy as np


def scalar_bytes(scalar: Any) -> bytes:
    """Returns the bytes of a text or binary scalar; empty for null."""
    buffer = scalar.as_buffer() if hasattr(scalar, "as_buffer") else None
    return b"" if buffer is None else bytes(buffer)


def scalar_text(scalar: Any, limit: int | None) -> tuple[str, int]:
    """Returns the text of a scalar, at most `limit` bytes of it, and the number of bytes of the full text.

    Invalid UTF-8 becomes replacement characters.
    """
    if hasattr(scalar, "dictionary"):
        scalar = scalar.dictionary[scalar.index.as_py()]
    buffer = scalar.as_buffer() if hasattr(scalar, "as_buffer") else None
    if buffer is None:
        return "", 0
    content = bytes(buffer if limit is None else buffer.slice(0, min(limit, buffer.size)))
    text = content.decode("utf-8", errors="replace")
    return (text.rstrip("\ufffd") if buffer.size > len(content) else text), buffer.size


def value_as_text(scalar: Any) -> str:
    """Returns a scalar of any type as text."""
    return scalar_text(scalar, None)[0] if hasattr(scalar, "as_buffer") else str(scalar.as_py())


def as_text(column: Any) -> Any:
    """Returns a column of texts, also where it was stored as a dictionary or as bytes."""
    import pyarrow

    kind = column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type
    texts = column.cast(kind) if kind != column.type else column
    return (
        texts.cast(pyarrow.large_string(), safe=False)
        if pyarrow.types.is_large_binary(kind) or pyarrow.types.is_binary(kind)
        else texts
    )


def list_values(scalar: Any) -> np.ndarray:
    """Returns the values of a list scalar; empty for null."""
    values = scalar.values
    return np.zeros(0) if values is None else np.asarray(values.to_numpy(zero_copy_only=False))


def has_mask(schema: Any) -> bool:
    """Returns whether a rollout log marks the tokens that the model sampled; a log without it has no others."""
    import pyarrow

    kind = schema.field("mask").type if "mask" in schema.names else None
    return kind is not None and pyarrow.types.is_list(kind) and pyarrow.types.is_boolean(kind.value_type)
