"""The images of prompts in a run folder, served as they are after a check."""

import re
import stat
from pathlib import Path
from typing import Any

from groupax.view.runs import NotFoundError

NAME = re.compile(r"images/[0-9a-f]{64}\.png")
SIGNATURE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
MAX_BYTES = 1 << 26
MAX_PIXELS = 50_000_000
MAX_SHOWN = 64  # of a prompt


def image_names(names: Any) -> list[str]:
    """Returns the names that are those of images of a run folder; others are left out."""
    return [name for name in names or () if isinstance(name, str) and NAME.fullmatch(name)][:MAX_SHOWN]


def read_image(folder: Path, name: str) -> bytes:
    """Returns an image of a run folder, a PNG file.

    Args:
        folder: The run folder.
        name: Name of the file (see `data.images.image_name`).

    Raises:
        NotFoundError: There is no such image.
        ValueError: The file is no image of a size that is shown.
    """
    if not NAME.fullmatch(name):
        raise NotFoundError(f"{name[:100]!r} is not the name of an image: images/, 64 hexadecimal digits, .png")
    path = folder / name
    try:
        found = path.lstat()
    except OSError as error:
        raise NotFoundError(f"the run has no {name}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
        raise ValueError(f"{name} is not a file of at most {MAX_BYTES:,} bytes")
    content = path.read_bytes()
    width, height = (int.from_bytes(content[start : start + 4], "big") for start in (16, 20))
    if not content.startswith(SIGNATURE) or not 0 < width * height <= MAX_PIXELS:
        raise ValueError(f"{name} is not a PNG file of at most {MAX_PIXELS:,} pixels")
    return content
