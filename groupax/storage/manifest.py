"""The manifest of a folder: the files that groupax wrote into it, each with its fingerprint."""

import hashlib
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from groupax.storage.folders import read_json, write_json

MANIFEST = ".groupax_files.json"
SAMPLE_BYTES, NUM_SAMPLES = 1 << 16, 64  # larger files are fingerprinted by samples, since reading them takes long


def written_files(folder: Path) -> dict[str, str]:
    """Returns the files of a folder that groupax wrote and nobody changed since, with their fingerprints."""
    return {name: mark for name, mark in read_manifest(folder).items() if is_unchanged(folder / name, mark)}


def changed_files(folder: Path) -> list[str]:
    """Returns the files of a folder that groupax wrote and somebody changed since."""
    return [
        name
        for name, mark in read_manifest(folder).items()
        if (folder / name).exists() and not is_unchanged(folder / name, mark)
    ]


def read_manifest(folder: Path) -> dict[str, str]:
    """Returns the listed files with their fingerprints; none if the manifest is missing or unreadable.

    Names that lead out of the folder are left out.
    """
    if not (folder / MANIFEST).is_file() or (folder / MANIFEST).is_symlink():
        return {}
    try:
        files = read_json(folder / MANIFEST).get("files")
    except ValueError:  # then no file in the folder is known to be ours
        return {}
    files = files if isinstance(files, dict) else {}
    return {name: str(mark) for name, mark in files.items() if _is_inside(name)}


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def is_unchanged(path: Path, mark: str) -> bool:
    """Returns whether a path is a regular file with this fingerprint."""
    return not path.is_symlink() and path.is_file() and fingerprint(path) == mark


def fingerprint(path: Path) -> str:
    """Returns a file's size and a SHA-256 sum: of all of it, or of samples if it exceeds 4 MiB."""
    size, digest = path.stat().st_size, hashlib.sha256()
    is_small = size <= NUM_SAMPLES * SAMPLE_BYTES
    with path.open("rb") as file:
        for index in range(NUM_SAMPLES):
            if not is_small:
                file.seek((size - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return f"{size}:{digest.hexdigest()}"


def write_manifest(folder: Path, names: Collection[str]) -> None:
    """Lists these files of a folder, and no others, as written by groupax."""
    write_fingerprints(folder, {name: fingerprint(folder / name) for name in names if name != MANIFEST})


def write_fingerprints(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the manifest atomically.

    Args:
        folder: Folder of the files.
        files: Fingerprints by file name.
    """
    about = "Files of a model that groupax wrote. Others in this folder are left alone when it is written again."
    partial = folder / f"{MANIFEST}.partial-{secrets.token_hex(4)}"
    write_json(partial, {"about": about, "files": dict(files)})
    partial.replace(folder / MANIFEST)
