"""The list of the files that groupax wrote into a folder, with the fingerprint of each."""

import hashlib
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from groupax.storage.folders import read_json, write_json

MANIFEST = ".groupax_files.json"
SAMPLED_BYTES, SAMPLES = 1 << 16, 64  # of files that would take long to read


def written_files(folder: Path) -> dict[str, str]:
    """The files that groupax wrote into a folder and that are as they were written, with their fingerprints."""
    return {name: mark for name, mark in read_manifest(folder).items() if is_as_written(folder / name, mark)}


def changed_files(folder: Path) -> list[str]:
    """The files that groupax wrote into a folder and that have other contents now."""
    return [
        name
        for name, mark in read_manifest(folder).items()
        if (folder / name).exists() and not is_as_written(folder / name, mark)
    ]


def read_manifest(folder: Path) -> dict[str, str]:
    """The manifest of a folder, without entries that are no files in it; empty if there is none that can be read."""
    if not (folder / MANIFEST).is_file() or (folder / MANIFEST).is_symlink():
        return {}
    try:
        files = read_json(folder / MANIFEST).get("files")
    except ValueError:  # nothing in the folder is known to be ours then
        return {}
    files = files if isinstance(files, dict) else {}
    return {name: str(mark) for name, mark in files.items() if _is_inside(name)}


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def is_as_written(path: Path, mark: str) -> bool:
    return not path.is_symlink() and path.is_file() and fingerprint(path) == mark


def fingerprint(path: Path) -> str:
    """The size and a SHA-256 sum of a file: of all of it, or of samples throughout one of more than 4 MiB."""
    size, digest = path.stat().st_size, hashlib.sha256()
    whole = size <= SAMPLES * SAMPLED_BYTES
    with path.open("rb") as file:
        for index in range(SAMPLES):
            if not whole:
                file.seek((size - SAMPLED_BYTES) * index // (SAMPLES - 1))
            digest.update(file.read(SAMPLED_BYTES))
    return f"{size}:{digest.hexdigest()}"


def write_manifest(folder: Path, names: Collection[str]) -> None:
    """Lists files of a folder as written by groupax, and no others."""
    files = {name: fingerprint(folder / name) for name in names if name != MANIFEST}
    write_fingerprints(folder, files)


def write_fingerprints(folder: Path, files: Mapping[str, str]) -> None:
    about = "Files of a model that groupax wrote. Others in this folder are left alone when it is written again."
    partial = folder / f"{MANIFEST}.partial-{secrets.token_hex(4)}"
    write_json(partial, {"about": about, "files": dict(files)})
    partial.replace(folder / MANIFEST)
