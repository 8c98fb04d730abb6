"""The text of completions, whatever their form. Imports no jax."""

from typing import Any


def completion_text(completion: Any) -> str:
    """The completion itself if it is a string, else the content of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
