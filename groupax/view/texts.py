"""The texts of prompts that the page shows, searches and identifies them by."""

import hashlib
import json
from typing import Any

from groupax.view.arrow import scalar_bytes

PREVIEW_CHARACTERS = 320
SHOWN_CHARACTERS = 20_000  # of a text, until the full text is requested


def messages(prompt: str) -> list[dict[str, str]]:
    """Returns the turns of a conversation; none if the prompt is plain text."""
    if not prompt.startswith("[{"):
        return []
    try:
        turns = json.loads(prompt)
    except (ValueError, RecursionError):
        return []
    if not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return []
    return [{"role": str(turn["role"]), "content": _content(turn.get("content"))} for turn in turns]


def shown_prompt(prompt: str) -> str:
    """Returns the text that stands for a prompt in a list: the last turn of a conversation."""
    turns = messages(prompt)
    return turns[-1]["content"] if turns else prompt


def searched_text(prompt: str) -> str:
    """Returns the text that a search looks at: all turns of a conversation."""
    turns = messages(prompt)
    return "\n".join(turn["content"] for turn in turns) if turns else prompt


def prompt_key(scalar: Any) -> str:
    """Returns a hash that identifies a prompt in all steps."""
    return hashlib.blake2b(scalar_bytes(scalar), digest_size=8).hexdigest()


def truncate(text: str) -> str:
    """Returns the first `SHOWN_CHARACTERS` of a text."""
    return text[:SHOWN_CHARACTERS]


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return "" if content is None else json.dumps(content)


def _part(part: Any) -> str:
    """Returns a part of a message as text; "[image]" for an image, which the page shows next to it."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    return "[image]" if isinstance(part, dict) and part.get("type") == "image" else json.dumps(part)
