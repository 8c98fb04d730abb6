"""The text of completions, whatever their form. Imports no jax."""

import re
from typing import Any


def completion_text(completion: Any) -> str:
    """The completion itself if it is a string, else the content of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def tagged(text: str, tag: str) -> str:
    """What stands in the last `<tag>...</tag>`, or the whole text if there is none."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[-1] if found else text
