"""Checksums of a checkpoint's files. Imports no jax."""

import hashlib
import os
from pathlib import Path

CHECKSUMS = "SHA256SUMS"  # as `sha256sum -c` reads it
STATE = "state.json"


def seal(folder: Path) -> None:
    """Writes the checksums of all files in the folder, and flushes everything to the disk."""
    files = _files(folder)
    sums = folder / CHECKSUMS
    sums.write_text("".join(f"{_sha256(folder / name)}  {name}\n" for name in files), encoding="utf-8")
    for name in (*files, CHECKSUMS):
        sync_to_disk(folder / name)
    for parent in {(folder / name).parent for name in files} | {folder}:
        sync_to_disk(parent)


def damage(folder: Path) -> str | None:
    """Returns what is wrong with a checkpoint: a file is missing, differs, or has no checksum. None if it is intact."""
    if not (folder / CHECKSUMS).is_file():
        return f"{CHECKSUMS} is missing: the folder was not written or copied to its end"
    expected = {}
    for line in (folder / CHECKSUMS).read_text(encoding="utf-8", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        expected[name] = digest
    if STATE not in expected:
        return f"{CHECKSUMS} does not list {STATE}: it is damaged"
    found = _files(folder)
    for name, digest in expected.items():
        if name not in found:
            return f"{name} is missing"
        if _sha256(folder / name) != digest:
            return f"{name} ({(folder / name).stat().st_size} bytes) is not what was written: its checksum differs"
    unlisted = [name for name in found if name not in expected]
    return f"{CHECKSUMS} does not list {unlisted[0]}: it is damaged" if unlisted else None


def sync_to_disk(path: Path) -> None:
    """Flushes a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[str]:
    """Returns all files below the folder except the checksums and hidden files."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if str(path) != CHECKSUMS and not path.name.startswith("."))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
