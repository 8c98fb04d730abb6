"""Reading what somebody else has made: neither its depth nor its size may be more than this process can hold.

Functions from a value of JSON to whether it is right describe what it should be.
"""

import contextlib
import json
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_DEPTH = 64  # of JSON; messages with tools' schemas have about ten levels

IsRight = Callable[[Any], bool]


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


def is_count(value: Any) -> bool:
    """Returns whether a value is an integer from 0 that floats hold exactly."""
    return type(value) is int and 0 <= value < 2**53


def is_number(value: Any) -> bool:
    """Returns whether a value is a number that floats hold, which includes NaN and the infinities."""
    return type(value) is float or (type(value) is int and abs(value) < 2**53)


def is_text(value: Any) -> bool:
    """Returns whether a value is a text."""
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    """Returns whether a value is true or false."""
    return isinstance(value, bool)


def list_of(is_right: IsRight) -> IsRight:
    """Returns the check for lists of right values."""
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def mapping_of(is_right: IsRight) -> IsRight:
    """Returns the check for mappings of any names to right values."""
    return lambda value: isinstance(value, dict) and all(map(is_right, value.values()))


def optional(is_right: IsRight) -> IsRight:
    """Returns the check for right values and null."""
    return lambda value: value is None or is_right(value)


def record_of(checks: Mapping[str, IsRight]) -> IsRight:
    """Returns the check for mappings of exactly these names to values that are right for each."""
    return lambda value: (
        isinstance(value, dict)
        and value.keys() == checks.keys()
        and all(is_right(value[name]) for name, is_right in checks.items())
    )


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
