"""The text of completions, whatever their form, and the part of it that answers. Imports no jax."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_ANSWER_TEXT = 100_000  # characters at the end of a completion in which an answer is looked for
BRACES = re.compile(r"\\boxed\s{0,9}\{|\\fbox\s{0,9}\{|\\[{}]|[{}]")


class Span(NamedTuple):
    """A part of a text, from `start` up to `end`, and what it contains."""

    start: int
    end: int
    content: str


def completion_text(completion: Any) -> str:
    """The completion itself if it is a string, else the text of its last message; "" where there is none."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else None
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))


def tagged(text: str, tag: str) -> str:
    """What stands in the last `<tag>...</tag>`, or the whole text if there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    # the last pair begins with the first tag that opens behind the end of the pair before it
    before = text.rfind(closing, 0, end) if end >= 0 else -1
    start = text.find(opening, before + len(closing) if before >= 0 else 0, end) if end >= 0 else -1
    return text if start < 0 else text[start + len(opening) : end]


def final_part(text: str) -> str:
    """What a completion says after its last `</think>`, or the whole of it; the end only of a very long one."""
    return text.rpartition("</think>")[2][-MAX_ANSWER_TEXT:]


def boxes(text: str) -> list[Span]:
    r"""Every `\boxed{...}` that closes, in the order in which they open. Their braces may be nested."""
    opened: list[re.Match[str]] = []
    found = []
    for brace in BRACES.finditer(text):
        if brace[0] in (r"\{", r"\}"):
            continue
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (start := opened.pop())[0] != "{":
            found.append(Span(start.start(), brace.end(), text[start.end() : brace.start()]))
    return sorted(found)
