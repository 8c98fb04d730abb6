"""Notes of people on a run: its name, tags and text, in `note.json` of its folder. Imports no jax."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from groupax.runs.files import read_record, replace_text

FILE, MAX_BYTES = "note.json", 1 << 16


@dataclass(frozen=True)
class Note:
    """A name that is shown in place of the folder's, tags to filter runs by, and notes of any length."""

    name: str = ""
    tags: Sequence[str] = ()
    notes: str = ""


def read_note(folder: Path) -> Note:
    """Returns the note on the run in a folder, empty where there is none or it is damaged."""
    found = read_record(folder / FILE, MAX_BYTES)
    tags = found.get("tags")
    tags = [each for each in tags if isinstance(each, str)] if isinstance(tags, list) else []
    return Note(str(found.get("name") or ""), tags, str(found.get("notes") or ""))


def check_run(folder: Path) -> None:
    """Raises a ValueError if there is no run in a folder."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a run folder: it has no config.json")


def write_note(folder: Path, note: Note) -> None:
    """Writes the note on the run in a folder; a ValueError says if a tag is not one word, or the note too long."""
    if odd := [tag for tag in note.tags if len(tag.split()) != 1]:
        raise ValueError(f"a tag must be one word, got {', '.join(map(repr, odd))}; join its parts, e.g. with a hyphen")
    text = json.dumps(asdict(note), indent=2) + "\n"
    if len(text) > MAX_BYTES:
        raise ValueError(f"the note has {len(text):,} characters, and may have {MAX_BYTES:,}")
    replace_text(folder / FILE, text)
