"""Untrusted text made safe to print: completions, prompts and error messages that quote them.

A terminal obeys control characters, and bidirectional overrides make a text look like another one. Both are replaced by
visible characters, so that a reader sees that they are there.
"""

from reprlib import Repr
from typing import Any

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong = 2, 80, 40


def printable(text: str) -> str:
    """Returns the text with a visible character for each one that a terminal would obey; newlines and tabs stay.

    C0 control characters become their pictures, all others that Python does not call printable their escapes.

    >>> printable("a\\x1b[2Jb\\u202ec")
    'a␛[2Jb\\\\u202ec'
    """
    is_plain = text.replace("\n", "").replace("\t", "").isprintable()
    return text if is_plain else "".join(c if c in "\n\t" else _visible(c) for c in text)


def one_line(text: str, limit: int = 160) -> str:
    """Returns the start of the text as `printable` shows it, on one line of at most `limit` characters."""
    visible = printable(text[: limit + 1]).replace("\n", "⏎").replace("\t", " ")
    return visible if len(visible) <= limit else f"{visible[: limit - 1]}…"


def error_line(error: BaseException | str, limit: int = 300) -> str:
    """Returns an error's message, which may quote untrusted text, on one line of at most `limit` characters."""
    return one_line(" ".join(str(error).split()), limit)


def short_repr(value: Any) -> str:
    """Returns an abbreviated `repr` of an untrusted value, on one line and without control characters."""
    return _SHORT.repr(value)


def _visible(c: str) -> str:
    if c.isprintable():
        return c
    code = ord(c)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    return " " if c.isspace() and code not in (0x85, 0x2028, 0x2029) else ascii(c)[1:-1]
