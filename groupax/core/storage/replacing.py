"""Atomic replacement of the folders that groupax writes models into; no file of another origin is ever lost.

A manifest lists the files that groupax wrote into a folder. A folder is written over only if it has no others, and none
that changed since, but for the card. The new folder is created next to the old one and takes its place in one step, so
that a killed process leaves either the old model or the new one. It may also leave a hidden folder `.NAME.partial-...`
next to it, which can be deleted.
"""

import ctypes
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from groupax.core.storage.folders import list_names, read_json, replacing_file, sync_to_disk, write_json

MANIFEST = ".groupax_files.json"
CARD = "README.md"  # an edited card is kept
SAMPLE_BYTES = 1 << 20
# Files that are read to load a model or its tokenizer. Those of another origin would mix with the new model's.
_MIXING_FILES = re.compile(r"adapter_config\.json|.*\.safetensors(\.index\.json)?")  # loaded in preference or addition
_MODEL_FILES = re.compile(rf"(config|generation_config|.*\.index)\.json|{_MIXING_FILES.pattern}")
_TOKENIZER_FILES = re.compile(
    r"(tokenizer.*|special_tokens_map|added_tokens|vocab|tekken)\.json|merges\.txt|vocab\.txt|.*\.(jinja|model)"
    r"|additional_chat_templates/.*"
)
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100  # constants of Linux


class ForeignFilesError(ValueError):
    """A folder contains files that groupax did not write, or that were changed since."""


# -- the manifest


def written_files(folder: Path) -> dict[str, str]:
    """Returns the files of a folder that groupax wrote and nobody changed since, with their marks.

    There are none if the manifest is missing or unreadable. Names that lead out of the folder are left out.
    """
    if (folder / MANIFEST).is_symlink():
        return {}
    try:
        files = read_json(folder / MANIFEST).get("files")
    except (FileNotFoundError, ValueError):  # then no file in the folder is known to be ours
        return {}

    def is_ours(name: str, mark: object) -> bool:
        path = PurePosixPath(name)
        is_inside = path.parts and "\0" not in name and not path.is_absolute() and ".." not in path.parts
        own = folder / name
        return bool(is_inside) and not own.is_symlink() and own.is_file() and _mark(own) == mark

    return {name: mark for name, mark in files.items() if is_ours(name, mark)} if isinstance(files, dict) else {}


def _mark(path: Path) -> str:
    """Returns a file's size and the SHA-256 sum of its first and last mebibytes; reading all of it takes long."""
    size = path.stat().st_size
    with path.open("rb") as file:
        sampled = file.read(SAMPLE_BYTES)
        file.seek(max(0, size - SAMPLE_BYTES))
        sampled += file.read()
    return f"{size}:{hashlib.sha256(sampled).hexdigest()}"


def _write_manifest(folder: Path, files: Mapping[str, str]) -> None:
    about = "Files of a model that groupax wrote. The folder is written over only as long as it has no others."
    with replacing_file(folder / MANIFEST) as partial:
        write_json(partial, {"about": about, "files": dict(files)})


# -- folders that are groupax's


def check_destination(folder: Path, sources: Collection[Path] = ()) -> None:
    """Refuses a folder, which need not exist, into which a model cannot be written without losing something.

    Raises:
        ForeignFilesError: The folder has files of another origin.
        ValueError: The folder is or contains the working directory, or it overlaps with a source of the model.
    """
    folder = _resolved(folder)
    check_disjoint(folder, sources)
    if _contains_cwd(folder):
        raise ValueError(
            f"{folder} is or contains the working directory, which cannot be replaced; choose another folder"
        )
    if folder.exists() and not folder.is_dir():
        raise ForeignFilesError(f"{folder} is a file; choose a folder for the model, which need not exist")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / MANIFEST).is_file():
        names = list_names(entry.name for entry in folder.iterdir())
        raise ForeignFilesError(
            f"{folder} contains files that groupax did not write ({names}) and never overwrites; choose another "
            "folder, which need not exist"
        )
    if foreign := _foreign_files(folder):
        raise ForeignFilesError(
            f"{folder} contains a model that groupax wrote, but {list_names(foreign)} came from elsewhere or changed "
            "since; move that away, or choose another folder"
        )


def is_replaceable(folder: Path) -> bool:
    """Returns whether a model can be written to a folder without losing something (see `check_destination`)."""
    try:
        check_destination(folder)
    except ValueError:
        return False
    return True


def check_disjoint(folder: Path, sources: Collection[Path]) -> None:
    """Raises a ValueError for a folder that is one of a model's sources, is inside one, or contains one."""

    def contains(outer: Path, inner: Path) -> bool:
        return outer.exists() and any(each.exists() and each.samefile(outer) for each in (inner, *inner.parents))

    folder = _resolved(folder)
    for source in (source.resolve() for source in sources):
        if contains(source, folder) or contains(folder, source):
            relation = "is" if folder == source else "is inside" if contains(source, folder) else "contains"
            raise ValueError(
                f"{folder} {relation} the folder that the model is read from ({source}); a model never overwrites its "
                "own source: choose a folder outside of it"
            )


@contextmanager
def replacing_folder(folder: Path, sources: Collection[Path] = ()) -> Iterator[Path]:
    """Yields a new folder to write a model into, which replaces `folder` when the block ends.

    If the block raises, nothing changes. An edited model card is kept.

    Args:
        folder: Destination, which need not exist; a link is followed.
        sources: Folders that the model was read from.

    Raises:
        ForeignFilesError, ValueError: `check_destination` refuses the folder.
    """
    folder = _resolved(folder)
    check_destination(folder, sources)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        yield partial
        _write_manifest(partial, {name: _mark(partial / name) for name in _files_below(partial)})
        replaces = folder.is_dir() and any(folder.iterdir())
        if replaces:
            check_destination(folder, sources)  # the folder may have changed while the model was written
            if (folder / CARD).is_file() and CARD not in written_files(folder):
                shutil.copy2(folder / CARD, partial / CARD)
            shutil.copymode(folder, partial)
            for name in _files_below(partial):
                sync_to_disk(partial / name)
            _exchange(partial, folder)
        else:
            partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if replaces:
        shutil.rmtree(partial)


def replace_card(folder: Path, text: str) -> None:
    """Rewrites the card of a model's folder, if groupax wrote the one that is there."""
    own = written_files(folder)
    if CARD not in own:
        return
    with replacing_file(folder / CARD) as partial:
        partial.write_text(text, encoding="utf-8")
    _write_manifest(folder, own | {CARD: _mark(folder / CARD)})


def _resolved(folder: Path) -> Path:
    if "\0" in str(folder):
        raise ValueError(f"{str(folder)!r} is not a valid folder name: it has a null character")
    return Path(os.path.realpath(folder.expanduser()))


def _contains_cwd(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:  # the working directory was deleted
        return False


def _foreign_files(folder: Path) -> list[str]:
    """Returns the files, links and other entries of a folder that groupax did not write, except a card."""
    own = {*written_files(folder), MANIFEST, CARD}
    return [name for name in _files_below(folder) if name not in own]


def _files_below(folder: Path) -> list[str]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [path.relative_to(folder).as_posix() for path in found]


def _exchange(new: Path, folder: Path) -> None:
    """Swaps two folders, atomically if the system supports it."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is not None:
        paths = os.fsencode(new), os.fsencode(folder)
        if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
    aside = new.with_name(f"{new.name}-old")
    folder.replace(aside)
    try:
        new.replace(folder)
    except OSError:
        aside.replace(folder)
        raise
    aside.replace(new)


# -- folders of others


def foreign_model_files(folder: Path) -> list[str]:
    """Returns the names of files of a model in a folder that groupax did not write and a model's would have to replace.

    Files of a tokenizer are not among them, since they are kept.
    """
    names = sorted({entry.name for entry in folder.iterdir()} - written_files(folder).keys())
    return [name for name in names if _MODEL_FILES.fullmatch(name) and not _TOKENIZER_FILES.fullmatch(name)]


def merge_into_folder(new: Path, folder: Path) -> None:
    """Copies a model of `replacing_folder` into a folder with other contents, file by file, `config.json` last.

    Files that groupax wrote are replaced. Tokenizer files and a card of another origin are kept. Raises a
    ForeignFilesError before anything is written if there are others with the names of a model's.
    """
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(written_files(new), key=lambda name: name in ("config.json", "adapter_config.json"))
    own = written_files(folder)
    present = [name for name in names if os.path.lexists(folder / name) and name not in own]
    kept = {name for name in present if name == CARD or _TOKENIZER_FILES.fullmatch(name)}
    others = [entry.name for entry in folder.iterdir() if entry.name not in {*own, *names}]
    foreign = {*present} - kept | {name for name in others if _MIXING_FILES.fullmatch(name)}
    if foreign:
        raise ForeignFilesError(
            f"{folder} contains {list_names(foreign)} that groupax did not write and never overwrites; choose "
            "another folder, or move them away"
        )
    written = [name for name in names if name not in kept]
    for name in written:
        with replacing_file(folder / name) as partial:
            shutil.copyfile(new / name, partial)
    for name in own.keys() - set(names):  # files of an earlier model
        (folder / name).unlink()
    _write_manifest(folder, {name: _mark(folder / name) for name in written})
