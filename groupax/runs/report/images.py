"""The images of prompts in a report, as `data:` URLs. Imports no jax."""

import base64
import io
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groupax.data.images import read_image, save_png

NAME = re.compile(r"images/[0-9a-f]{64}\.png")
MAX_BYTES = 1 << 26  # of a file
MAX_SIDE = 384  # pixels; larger images are shown smaller
MAX_SHOWN = 8  # of a prompt


def image_names(prompt: str) -> list[str]:
    """Returns the names of the images' files of a prompt as text (see `rollout_log.prompt_text`)."""
    if not prompt.startswith("[{"):
        return []
    try:
        return list(_named(json.loads(prompt)))[:MAX_SHOWN]
    except (RecursionError, ValueError):
        return []


def image_urls(folder: Path, prompt: str) -> list[str]:
    """Returns the images of a prompt as PNG files in `data:` URLs, without those that cannot be read.

    Args:
        folder: The run folder.
        prompt: The prompt as text.
    """
    urls = (_url(folder / name) for name in image_names(prompt))
    return [url for url in urls if url]


def _named(messages: Any) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            name = part.get("image") if isinstance(part, dict) and part.get("type") == "image" else None
            if isinstance(name, str) and NAME.fullmatch(name):
                yield name


def _url(path: Path) -> str:
    """Returns a file decoded and encoded again as PNG, at most `MAX_SIDE` pixels wide and high; empty if unreadable."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            return ""
        image = read_image(path.read_bytes(), path.name).copy()
        image.thumbnail((MAX_SIDE, MAX_SIDE))
    except (ImportError, OSError, ValueError):
        return ""
    file = io.BytesIO()
    save_png(image, file)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
