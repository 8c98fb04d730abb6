"""Atomic replacement of the folders that groupax writes models into; no file of another origin is ever lost.

A folder is written over only if every file in it that belongs to a model is listed in its manifest and unchanged. The
new folder is created next to the old one, receives hard links to all other files of the old one, and takes its place in
one step, so that a killed process leaves either the old model or the new one. It may also leave a hidden folder
`.NAME.partial-...` next to it, which can be deleted.
"""

import ctypes
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from groupax.storage.folders import list_names
from groupax.storage.manifest import (
    MANIFEST,
    changed_files,
    fingerprint,
    is_unchanged,
    read_manifest,
    write_fingerprints,
    write_manifest,
    written_files,
)

logger = logging.getLogger(__name__)
CARD = "README.md"  # an edited card is kept
# Files that are read to load a model or its tokenizer. Those of another origin would mix with the new model's.
MODEL_FILES = re.compile(
    r"(config|generation_config|adapter_config|special_tokens_map|added_tokens|vocab|tekken|tokenizer.*|.*\.index)\.json"
    r"|merges\.txt|vocab\.txt|.*\.(safetensors|jinja|model)|additional_chat_templates",
)
_TOKENIZER_FILES = re.compile(
    r"(tokenizer.*|special_tokens_map|added_tokens|vocab|tekken)\.json|merges\.txt|vocab\.txt|.*\.(jinja|model)"
    r"|additional_chat_templates/.*"
)
_MIXING_FILES = re.compile(r"adapter_config\.json|.*\.safetensors(\.index\.json)?")  # loaded in preference or addition
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100  # constants of Linux


class ForeignFilesError(ValueError):
    """A folder contains files that groupax did not write, or that were changed since."""


def check_destination(folder: Path, sources: Collection[Path] = ()) -> None:
    """Refuses a folder into which a model cannot be written without losing something.

    Args:
        folder: Destination, which need not exist.
        sources: Folders that the model was read from.

    Raises:
        ForeignFilesError: Files of another origin are where a model's files belong.
        ValueError: The folder is or contains the working directory, or it overlaps with a source.
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
    foreign = [name for name in changed_files(folder) if name != CARD]
    known = {PurePosixPath(name).parts[0] for name in written_files(folder)}
    entries = [entry.name for entry in folder.iterdir() if MODEL_FILES.fullmatch(entry.name)]
    foreign += [name for name in entries if name not in known]
    if foreign:
        raise ForeignFilesError(
            f"{folder} contains a model that groupax wrote, but {list_names(set(foreign))} came from elsewhere or "
            "changed since; move that away, or choose another folder"
        )


def check_disjoint(folder: Path, sources: Collection[Path]) -> None:
    """Refuses a folder that is one of a model's sources, is inside one, or contains one, under any name.

    Raises:
        ValueError: The folder overlaps with a source.
    """

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


def _contains_cwd(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:  # the working directory was deleted
        return False


def _resolved(folder: Path) -> Path:
    if "\0" in str(folder):
        raise ValueError(f"{str(folder)!r} is not a valid folder name: it has a null character")
    return folder.expanduser().resolve()


@contextmanager
def replacing_folder(folder: Path, sources: Collection[Path] = ()) -> Iterator[Path]:
    """Yields a new folder to write a model into, which replaces `folder` when the block ends.

    If the block raises, nothing changes. Files in `folder` that groupax did not write are kept, and so is an edited
    model card.

    Args:
        folder: Destination, which need not exist; a link is followed.
        sources: Folders that the model was read from.

    Raises:
        ForeignFilesError, ValueError: `check_destination` refuses the folder.
    """
    folder = _resolved(folder)
    check_destination(folder, sources)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _warn_of_leftovers(folder)
    partial = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        yield partial
        write_manifest(partial, _files_below(partial))
        replaces = folder.is_dir() and any(folder.iterdir())
        if replaces:
            check_destination(folder, sources)  # the folder may have changed while the model was written
            _adopt_others(folder, partial)
            shutil.copymode(folder, partial)
            for name in read_manifest(partial):
                _fsync(partial / name)
            _exchange(partial, folder)
        else:
            partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if replaces:
        _remove_replaced(partial, folder)


def replace_card(folder: Path, text: str) -> None:
    """Rewrites the card of a model's folder, if groupax wrote the one that is there."""
    if CARD not in written_files(folder):
        return
    partial = folder / f".{CARD}.partial-{secrets.token_hex(4)}"
    partial.write_text(text, encoding="utf-8")
    partial.replace(folder / CARD)
    write_fingerprints(folder, {**read_manifest(folder), CARD: fingerprint(folder / CARD)})


def is_replaceable(folder: Path) -> bool:
    """Returns whether a folder is absent, or has only unchanged files of groupax and is not the working directory."""
    folder = _resolved(folder)
    if not folder.is_dir() or _contains_cwd(folder):
        return not folder.exists()
    own = {*written_files(folder), MANIFEST}
    return all(path.relative_to(folder).as_posix() in own for path in folder.rglob("*") if not path.is_dir())


def foreign_model_files(folder: Path) -> list[str]:
    """Returns the names of files of a model in a folder that groupax did not write and a model's would have to replace.

    Files of a tokenizer are not among them, since they are kept.
    """
    own = written_files(folder)
    names = sorted(entry.name for entry in folder.iterdir() if entry.name not in own)
    return [name for name in names if MODEL_FILES.fullmatch(name) and not _TOKENIZER_FILES.fullmatch(name)]


def merge_into_folder(new: Path, folder: Path) -> None:
    """Copies a written model into a folder with other contents, file by file, `config.json` last.

    Files that groupax wrote and files with the same contents are replaced. Tokenizer files and a card of another origin
    are kept.

    Args:
        new: A folder that `replacing_folder` has written.
        folder: Destination, which need not exist.

    Raises:
        ForeignFilesError: The destination has other files with the names of a model's. Nothing was written.
    """
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(read_manifest(new), key=lambda name: name in ("config.json", "adapter_config.json"))
    own = written_files(folder)
    present = [name for name in names if os.path.lexists(folder / name) and name not in own]
    kept = {name for name in present if name == CARD or _TOKENIZER_FILES.fullmatch(name)}
    same = {name for name in present if is_unchanged(folder / name, fingerprint(new / name))}
    foreign = [name for name in present if name not in kept | same]
    others = [entry.name for entry in folder.iterdir() if entry.name not in {*own, *names}]
    foreign += [name for name in others if _MIXING_FILES.fullmatch(name)]
    if foreign:
        raise ForeignFilesError(
            f"{folder} contains {list_names(set(foreign))} that groupax did not write and never overwrites; choose "
            "another folder, or move them away"
        )
    written = [name for name in names if name not in kept | same]
    for name in written:
        (folder / name).parent.mkdir(exist_ok=True)
        partial = folder / f".{Path(name).name}.partial-{secrets.token_hex(4)}"
        shutil.copyfile(new / name, partial)
        partial.replace(folder / name)
    for name in own.keys() - set(names):  # files of an earlier model
        (folder / name).unlink()
    write_manifest(folder, [*written, *(own.keys() & set(names))])


def _warn_of_leftovers(folder: Path) -> None:
    leftovers = sorted(
        path.name for path in folder.parent.iterdir() if path.name.startswith(f".{folder.name}.partial-")
    )
    if leftovers:
        logger.warning(
            "an earlier attempt to write %s was interrupted and left %s in %s, which can be deleted",
            *(folder, ", ".join(leftovers), folder.parent),
        )


def _files_below(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def _adopt_others(folder: Path, partial: Path) -> None:
    """Links everything in the old folder that is not an unchanged file of groupax into the new one."""
    own = {*written_files(folder), MANIFEST}
    for where, folders, files in os.walk(folder, onerror=_raise):
        inside = Path(where).relative_to(folder)
        links = [name for name in folders if (Path(where) / name).is_symlink()]
        for name in set(folders) - set(links):
            if os.path.ismount(Path(where) / name):
                raise ForeignFilesError(f"{Path(where) / name} is a mount; unmount it, or choose another folder")
            (partial / inside / name).mkdir(exist_ok=True)
            shutil.copystat(Path(where) / name, partial / inside / name)
        for name in (*files, *links):
            relative = inside / name
            if relative.as_posix() in own:
                continue
            if relative.as_posix() == CARD and (partial / CARD).exists():
                logger.warning("%s was edited, or is not groupax's, and is kept", folder / CARD)
                (partial / CARD).unlink()
            _link(folder / relative, partial / relative)


def _raise(error: OSError) -> None:
    raise error


def _link(source: Path, target: Path) -> None:
    """Creates a hard link to a file, or a copy if the file system has no hard links.

    Raises:
        ForeignFilesError: The new folder has a file of that name.
    """
    if os.path.lexists(target):
        raise ForeignFilesError(f"{source} has the name of a file of the model; move it away, or choose another folder")
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        if not source.is_symlink() and not source.is_file():  # copying a pipe would block until somebody writes to it
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _remove_replaced(old: Path, folder: Path) -> None:
    """Removes from a replaced folder what groupax wrote and what the new folder has too."""
    own = {*written_files(old), MANIFEST}
    for where, folders, files in os.walk(old, topdown=False):
        for path in (Path(where) / name for name in (*files, *folders)):
            relative = path.relative_to(old)
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif relative.as_posix() in own or _is_same(path, folder / relative):
                path.unlink()
    if any(old.iterdir()):
        logger.warning("files that changed in %s while its model was replaced are in %s", folder, old)
    else:
        old.rmdir()


def _is_same(path: Path, other: Path) -> bool:
    """Returns whether two paths are one file, or the second one is a copy of the first."""
    if not os.path.lexists(other):
        return False
    first, second = path.lstat(), other.lstat()
    return os.path.samestat(first, second) or (first.st_mode, first.st_size, first.st_mtime_ns) == (
        *(second.st_mode, second.st_size, second.st_mtime_ns),
    )
