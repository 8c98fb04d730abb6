"""The text of completions, and the section of it that holds the answer. Imports no jax."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_ANSWER_TEXT = 100_000  # characters at the end of a completion that are searched for an answer
BRACES = re.compile(
    r"\\(?:boxed|fbox)\s{0,9}\{|\\(?:boxed|fbox)\s{0,9}(?P<bare>[-+]?(?:[\d.]|\\[a-zA-Z])(?:\{[^{}]{0,99}\}|[^\s${}]){0,99})"
    r"|\\[{}]|[{}]"
)


class Span(NamedTuple):
    """A span of a text, from `start` up to `end`, and its content."""

    start: int
    end: int
    content: str


def completion_text(completion: Any) -> str:
    """Returns the completion if it is a string, else the text of the assistant's last message; "" if there is none."""
    if isinstance(completion, str):
        return completion
    own = [message for message in completion if message.get("role", "assistant") == "assistant"]
    content = own[-1].get("content") if own else None
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))


def with_thinking(text: str, tag: str = "think") -> str:
    """Returns a completion with the opening tag of its thinking, which chat templates of reasoning models write.

    This is a completion in which a tag whose name begins with "think" is closed before it is opened.
    """
    start = text.find(f"</{tag}>")
    begun = tag.startswith("think") and start >= 0 and f"<{tag}>" not in text[:start]
    return f"<{tag}>{chr(10) * (text[:1] != chr(10))}{text}" if begun else text


def tagged(text: str, tag: str) -> str:
    """Returns the content of the last `<tag>...</tag>`, or the whole text if there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    # the last pair starts with the first opening tag after the end of the previous pair
    before = text.rfind(closing, 0, end) if end >= 0 else -1
    start = text.find(opening, before + len(closing) if before >= 0 else 0, end) if end >= 0 else -1
    return text if start < 0 else text[start + len(opening) : end]


def final_part(text: str) -> str:
    """Returns the completion after its last `</think>`, if there is one; of a very long text only the end."""
    return text.rpartition("</think>")[2][-MAX_ANSWER_TEXT:]


def boxes(text: str) -> list[Span]:
    r"""Returns every `\boxed{...}` that is closed, and `\boxed 7`, in their order. Braces may be nested."""
    opened: list[re.Match[str]] = []
    found = []
    for brace in BRACES.finditer(text):
        if brace[0] in (r"\{", r"\}"):
            continue
        if brace["bare"]:
            found.append(Span(brace.start(), brace.end(), brace["bare"]))
        elif brace[0] != "}":
            opened.append(brace)
        elif opened and (start := opened.pop())[0] != "{":
            found.append(Span(start.start(), brace.end(), text[start.end() : brace.start()]))
    return sorted(found)
