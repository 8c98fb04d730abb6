"""Regular expressions of JSON strings: of some length, of a format, or matching a pattern. Imports no jax."""

import re
from collections.abc import Iterator

from groupax.constraints.characters import Ranges, complement, intersection, union

# A character of a string: itself, or escaped; no half of a surrogate pair.
_PLAIN = r'[^"\\\x00-\x1F]'
CHARACTER = rf'(?:{_PLAIN}|\\(?:["\\/bfnrt]|u(?:[0-9a-cefA-CEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{{2}}))'
STRING = f'"{CHARACTER}*"'

_YEAR = "[0-9]{4}"
_DATE = (
    r"(?:0[1-9][0-9]{2}|[1-9][0-9]{3})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_OFFSET = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,20}[a-z0-9])?"
_MINUTES = "M(?:[0-9]{1,2}S)?"
_DURATION = (
    f"P(?:[0-9]{{1,4}}W|[0-9]{{1,4}}D(?:T[0-9]{{1,2}}H)?|T[0-9]{{1,4}}(?:H(?:[0-9]{{1,2}}{_MINUTES})?|{_MINUTES}|S))"
)
# Strings of a format; none of their characters needs to be escaped. Other formats are annotations.
FORMATS = {
    "date": _DATE,
    "time": _CLOCK + _OFFSET,
    "date-time": f"{_DATE}T{_CLOCK}{_OFFSET}",
    "duration": _DURATION,
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uuid4": "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}",
    "email": rf"[a-z0-9_+-]{{1,20}}(?:\.[a-z0-9_+-]{{1,20}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{0,2}}\.[a-z]{{2,10}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,4}}",
    "uri": rf"https?://{_LABEL}(?:\.{_LABEL}){{1,3}}(?:/[A-Za-z0-9_.~-]{{1,40}}){{0,4}}/?",
}


def string_regex(min_length: int, max_length: int | None) -> str:
    """Returns the expression of the strings of a length."""
    if min_length == 0 and max_length is None:
        return STRING
    most = "" if max_length is None else max_length
    return f'"{CHARACTER}{{{min_length},{most}}}"'


def format_regex(name: str) -> str | None:
    """Returns the expression of the strings of a format; None for formats that are mere annotations."""
    return f'"{FORMATS[name]}"' if name in FORMATS else None


# Characters of a string that need no escapes, and the classes of ASCII.
_PLAIN_RANGES = complement(((0, 31), (34, 34), (92, 92)))
_CLASSES: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}
_CLASSES |= {name.upper(): complement(ranges) for name, ranges in _CLASSES.items()}
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_ANY = _PLAIN
_UNSUPPORTED = re.compile(r"\(\?(?!:)|\\[1-9bBAZzGkpPcux]")


def pattern_regex(pattern: str) -> str:
    """Returns the expression of the strings that a pattern of a schema matches, as far as they need no escapes.

    A pattern is an expression of ECMA 262 that matches anywhere in a string; its classes, such as digits, mean ASCII.

    Raises:
        ValueError: The pattern has look-around, backreferences, or anchors other than at its ends.
    """
    if unsupported := _UNSUPPORTED.search(pattern):
        raise ValueError(
            f"pattern {pattern!r} has {unsupported[0]!r}; look-around, backreferences, word boundaries and Unicode "
            "classes are not supported"
        )
    start, end = pattern.startswith("^"), pattern.endswith("$") and not _is_escaped(pattern, len(pattern) - 1)
    inner = pattern[1 if start else 0 : len(pattern) - 1 if end else len(pattern)]
    body, has_choice = _translated(inner, pattern)
    if has_choice and (start or end):
        raise ValueError(f"pattern {pattern!r} has an anchor in one of several choices; write ^(?:a|b)$")
    before, after = "" if start else f"{_ANY}*", "" if end else f"{_ANY}*"
    return f'"{before}(?:{body}){after}"'


def _is_escaped(text: str, index: int) -> bool:
    return (index - len(text[:index].rstrip("\\"))) % 2 == 1


def _translated(inner: str, pattern: str) -> tuple[str, bool]:
    """Returns a pattern without anchors in the library's syntax, and whether it is a choice at its outermost level."""
    parts, index, depth, has_choice = [], 0, 0, False
    while index < len(inner):
        char = inner[index]
        if char == "\\":
            parts.append(_escape(inner[index + 1 : index + 2], pattern))
            index += 2
            continue
        if char == "[":
            end = _class_end(inner, index, pattern)
            parts.append(_class(inner[index + 1 : end], pattern))
            index = end + 1
            continue
        if char in "^$":
            raise ValueError(f"pattern {pattern!r} has {char!r} in its middle; anchors may only be at its ends")
        depth += {"(": 1, ")": -1}.get(char, 0)
        has_choice = has_choice or (char == "|" and depth == 0)
        parts.append(_ANY if char == "." else _literal(char) if char not in "()|*+?{},:" else char)
        index += 1
    return "".join(parts), has_choice


def _escape(char: str, pattern: str) -> str:
    """Returns the expression of an escape outside of classes."""
    if char in _CLASSES:
        return _one_of(_CLASSES[char])
    if not char or char.isalnum():
        raise ValueError(f"pattern {pattern!r} has the escape {chr(92) + char!r}, which is not supported")
    return _literal(char)


def _literal(char: str) -> str:
    """Returns the expression of a character as JSON writes it."""
    if char in '"\\':
        return "\\\\" + re.escape(char)
    if char < " ":
        raise ValueError(f"a pattern has the control character {char!r}, which is not supported")
    return re.escape(char)


def _class_end(inner: str, start: int, pattern: str) -> int:
    index = start + 1 + inner.startswith("[^", start)
    while index < len(inner) and inner[index] != "]":
        index += 2 if inner[index] == "\\" else 1
    if index >= len(inner):
        raise ValueError(f"pattern {pattern!r} has a class without an end")
    return index


def _class(content: str, pattern: str) -> str:
    """Returns the expression of a class, as far as its characters need no escapes in JSON."""
    is_negated, content = content.startswith("^"), content.removeprefix("^")
    found: list[tuple[int, int]] = []
    items = list(_class_items(content, pattern))
    while items:
        item = items.pop(0)
        if len(items) > 1 and items[0] == 45 and isinstance(item, int) and isinstance(items[1], int):
            last = items[1]
            if last < item:
                raise ValueError(f"pattern {pattern!r} has a range in a class that ends before it starts")
            found.append((item, last))
            del items[:2]
        elif isinstance(item, int):
            found.append((abs(item), abs(item)))
        else:
            found += item
    ranges = union(found)
    return _one_of(complement(ranges) if is_negated else ranges)


def _class_items(content: str, pattern: str) -> Iterator[int | Ranges]:
    """Yields the characters of a class, an escaped hyphen as a negative number, and the classes within it."""
    index = 0
    while index < len(content):
        char = content[index]
        if char == "\\":
            index += 1
            char = content[index : index + 1]
            if char in _CONTROL:
                yield _CONTROL[char]
            elif char in _CLASSES:
                yield _CLASSES[char]
            elif not char or char.isalnum():
                raise ValueError(f"pattern {pattern!r} has the escape {chr(92) + char!r} in a class")
            else:
                yield -45 if char == "-" else ord(char)
        else:
            yield ord(char)
        index += 1


def _one_of(ranges: Ranges) -> str:
    """Returns the expression of one of these characters that needs no escape in JSON."""
    kept = intersection(ranges, _PLAIN_RANGES)
    if not kept:
        return "[^\\x00-\\U0010FFFF]"  # matches nothing
    return f"[{''.join(f'{chr(92)}U{low:08X}-{chr(92)}U{high:08X}' for low, high in kept)}]"
