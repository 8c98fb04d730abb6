"""Reading what somebody else has made: neither its depth nor its size may be more than this process can hold."""

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_DEPTH = 64  # of JSON; messages with tools' schemas have about ten levels


def plain_json(text: bytes, name: str) -> Any:
    """Returns the content of JSON.

    Args:
        text: The JSON.
        name: Name of the file in errors.

    Raises:
        ValueError: It is none, or is nested too deeply.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        depth = MAX_DEPTH + 1
    except ValueError as error:
        raise ValueError(f"{name} of the bundle cannot be read: {error}") from error
    else:
        depth = _depth(content)
    if depth > MAX_DEPTH:
        raise ValueError(f"{name} of the bundle is nested more than {MAX_DEPTH} levels deep")
    return content


def _depth(content: Any) -> int:
    """Returns the number of levels of lists and mappings."""
    level, depth = [content], -1
    while level:
        lists = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level, depth = [value for values in lists for value in values], depth + 1
    return depth


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Limits what this process may allocate within the block, where larger allocations raise a `MemoryError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + num_bytes
    limits = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([limit, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Returns the size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
