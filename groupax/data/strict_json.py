"""JSON that a model has written: no NaN, no repeated keys, no deep nesting, but raw line breaks in strings.

Imports no jax.
"""

import json
import math
import re
from collections import Counter
from typing import Any

MAX_DEPTH = 64  # of nested objects and arrays
SPACE = re.compile(r"\s*+")
QUOTED = 40  # characters of the text that an error quotes


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Returns the JSON value that begins at a position of a text, and the position of its end.

    Args:
        text: Text with the value; white space before it is skipped.
        start: Position in the text. Positions in errors count from here.

    Raises:
        ValueError: It is not valid JSON, repeats a key, has a half of a surrogate pair, or is nested too deeply.
    """
    begin = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        where = f"at character {error.pos - start}"
        if error.pos >= len(text) or error.msg.startswith("Unterminated string"):
            raise ValueError(f"it is cut off: {error.msg} {where}") from error
        raise ValueError(f"{error.msg} {where}, before {text[error.pos : error.pos + QUOTED]!r}") from error
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    _check_depth(value)
    if "\\u" in text[begin:end]:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it has half of a surrogate pair, which is no character") from error
    return value, end


def skip_space(text: str, start: int) -> int:
    """Returns the position of the first character that is no white space, at or after `start`."""
    found = SPACE.match(text, start)
    return start if found is None else found.end()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated!r:.80} is repeated")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite, strict=False
)
