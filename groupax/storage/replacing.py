"""Folders that groupax writes models into: new ones appear whole, and files that it did not write are never lost.

A written folder lists its own files in `MANIFEST`. A folder is written over only where every file that belongs to a
model is listed there and still as it was written. The new folder is made beside the old one, receives what else lies in
the old one (hard links), and takes its place in one step, so that a process that is killed leaves the old model or the
new one. It may also leave a hidden folder `.NAME.partial-...` beside it, which can be deleted.
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
    is_as_written,
    read_manifest,
    write_fingerprints,
    write_manifest,
    written_files,
)

logger = logging.getLogger(__name__)
CARD = "README.md"  # whoever edits it keeps it
# What loading a model or its tokenizer reads. Of another origin such files would mix with those of the new model.
MODEL_FILES = re.compile(
    r"(config|generation_config|adapter_config|special_tokens_map|added_tokens|vocab|tekken|tokenizer.*|.*\.index)\.json"
    r"|merges\.txt|vocab\.txt|.*\.(safetensors|jinja|model)|additional_chat_templates",
)
_TOKENIZER_FILES = re.compile(
    r"(tokenizer.*|special_tokens_map|added_tokens|vocab|tekken)\.json|merges\.txt|vocab\.txt|.*\.(jinja|model)"
    r"|additional_chat_templates/.*"
)
_MIXING_FILES = re.compile(r"adapter_config\.json|.*\.safetensors(\.index\.json)?")  # loading would prefer or add them
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100  # of Linux


class ForeignFilesError(ValueError):
    """A folder holds files that groupax did not write, or not as they are now."""


def check_destination(folder: Path, sources: Collection[Path] = ()) -> None:
    """Refuses a folder into which a model cannot be written without a loss.

    Args:
        folder: need not exist.
        sources: the folders that the model was read from.

    Raises:
        ForeignFilesError: it holds files of another origin where a model's would be.
        ValueError: it is the working folder, or a source, or one lies in the other.
    """
    folder = _resolved(folder)
    check_disjoint(folder, sources)
    if _is_worked_in(folder):
        raise ValueError(f"{folder} is or contains the working folder, which cannot be replaced; choose another folder")
    if folder.exists() and not folder.is_dir():
        raise ForeignFilesError(f"{folder} is a file; choose a folder for the model, which need not exist")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / MANIFEST).is_file():
        names = list_names(entry.name for entry in folder.iterdir())
        raise ForeignFilesError(
            f"{folder} holds files that groupax did not write ({names}), and a model is never written over such; "
            "choose another folder, which need not exist"
        )
    own = written_files(folder)
    foreign = [name for name in changed_files(folder) if name != CARD]
    known = {PurePosixPath(name).parts[0] for name in own}
    entries = [entry.name for entry in folder.iterdir() if MODEL_FILES.fullmatch(entry.name)]
    foreign += [name for name in entries if name not in known]
    if foreign:
        raise ForeignFilesError(
            f"{folder} holds a model that groupax wrote, but {list_names(set(foreign))} "
            "came from elsewhere or changed since; move that away, or choose another folder"
        )


def _is_worked_in(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:  # the working folder was deleted
        return False


def _resolved(folder: Path) -> Path:
    if "\0" in str(folder):
        raise ValueError(f"{str(folder)!r} is no name of a folder: it has a null character")
    return folder.expanduser().resolve()


def check_disjoint(folder: Path, sources: Collection[Path]) -> None:
    """Refuses a folder that is one of a model's sources, lies in one, or contains one, by whatever name.

    Raises:
        ValueError: it does.
    """

    def holds(outer: Path, inner: Path) -> bool:
        return outer.exists() and any(each.exists() and each.samefile(outer) for each in (inner, *inner.parents))

    folder = _resolved(folder)
    for source in (source.resolve() for source in sources):
        if holds(source, folder) or holds(folder, source):
            where = "is" if folder == source else "lies in" if holds(source, folder) else "contains"
            raise ValueError(
                f"{folder} {where} the folder that the model is read from ({source}); a model is never written over "
                "its own source: choose a folder apart from it"
            )


@contextmanager
def replacing_folder(folder: Path, sources: Collection[Path] = ()) -> Iterator[Path]:
    """Gives a new folder to write a model into, and puts it in the place of `folder` when the block ends.

    Where the block raises, everything stays as it was. Files in `folder` that groupax did not write stay, and an edited
    card does.

    Args:
        folder: need not exist; a link is followed.
        sources: the folders that the model was read from.

    Raises:
        ForeignFilesError, ValueError: as `check_destination`.
    """
    folder = _resolved(folder)
    check_destination(folder, sources)
    folder.parent.mkdir(parents=True, exist_ok=True)
    leftovers = sorted(entry.name for entry in folder.parent.iterdir() if _is_leftover(entry.name, folder.name))
    if leftovers:
        logger.warning(
            "earlier writing of %s broke off and left %s in %s, which can be deleted",
            *(folder, ", ".join(leftovers), folder.parent),
        )
    partial = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        yield partial
        write_manifest(partial, _files_below(partial))
        replaces = folder.is_dir() and any(folder.iterdir())
        if replaces:
            check_destination(folder, sources)  # much may have happened while the model was written
            _adopt_others(folder, partial)
            shutil.copymode(folder, partial)
            for name in read_manifest(partial):
                _sync(partial / name)
            _exchange(partial, folder)
        else:
            partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if replaces:
        _remove_replaced(partial, folder)


def replace_card(folder: Path, text: str) -> None:
    """Writes the card of a model's folder anew, if groupax wrote the one that is there."""
    if CARD not in written_files(folder):
        return
    partial = folder / f".{CARD}.partial-{secrets.token_hex(4)}"
    partial.write_text(text, encoding="utf-8")
    partial.replace(folder / CARD)
    write_fingerprints(folder, {**read_manifest(folder), CARD: fingerprint(folder / CARD)})


def _is_leftover(name: str, of_folder: str) -> bool:
    return name.startswith(f".{of_folder}.partial-")


def _files_below(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def _adopt_others(folder: Path, partial: Path) -> None:
    """Gives a new folder what lies in the old one and is not a file of groupax as it was written."""
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
                logger.warning("%s was edited, or is not groupax's, and stays as it is", folder / CARD)
                (partial / CARD).unlink()
            _link(folder / relative, partial / relative)


def _raise(error: OSError) -> None:
    raise error


def _link(source: Path, target: Path) -> None:
    """Gives a file a second name, or makes a copy where the file system has no such names.

    Raises:
        ForeignFilesError: the new folder has a file of that name.
    """
    if os.path.lexists(target):
        raise ForeignFilesError(f"{source} has the name of a file of the model; move it away, or choose another folder")
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        if not source.is_symlink() and not source.is_file():  # a copy of a pipe would wait for a writer
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(new: Path, folder: Path) -> None:
    """Swaps two folders, in one step where the system can do that."""
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
    """Removes a folder whose place another one took: what groupax wrote, and what the other one has too."""
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
        logger.warning("what changed in %s while the model in it was replaced is in %s", folder, old)
    else:
        old.rmdir()


def _is_same(path: Path, other: Path) -> bool:
    """Whether these are one file, or the second one is a copy of the first."""
    if not os.path.lexists(other):
        return False
    mine, its = path.lstat(), other.lstat()
    return os.path.samestat(mine, its) or (mine.st_mode, mine.st_size, mine.st_mtime_ns) == (
        *(its.st_mode, its.st_size, its.st_mtime_ns),
    )


def is_replaceable(folder: Path) -> bool:
    """Whether all files of a folder are groupax's, as it wrote them, and nobody works in it; also if there is none."""
    folder = _resolved(folder)
    if not folder.is_dir() or _is_worked_in(folder):
        return not folder.exists()
    own = {*written_files(folder), MANIFEST}
    return all(path.relative_to(folder).as_posix() in own for path in folder.rglob("*") if not path.is_dir())


def merge_into_folder(new: Path, folder: Path) -> None:
    """Moves a written model into a folder that holds other things, file by file, `config.json` last.

    It replaces files that groupax wrote or whose contents are the same. A tokenizer's files and a card of another
    origin stay as they are.

    Args:
        new: a folder that `replacing_folder` has made.
        folder: need not exist.

    Raises:
        ForeignFilesError: it holds other files of the names of a model's, and nothing was written.
    """
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(read_manifest(new), key=lambda name: name in ("config.json", "adapter_config.json"))
    own = written_files(folder)
    there = [name for name in names if os.path.lexists(folder / name) and name not in own]
    kept = {name for name in there if name == CARD or _TOKENIZER_FILES.fullmatch(name)}
    same = {name for name in there if is_as_written(folder / name, fingerprint(new / name))}
    foreign = [name for name in there if name not in kept | same]
    others = [entry.name for entry in folder.iterdir() if entry.name not in {*own, *names}]
    foreign += [name for name in others if _MIXING_FILES.fullmatch(name)]
    if foreign:
        raise ForeignFilesError(
            f"{folder} holds {list_names(set(foreign))} that groupax did not write, and a model is never "
            "written over such; choose another folder, or move them away"
        )
    written = [name for name in names if name not in kept | same]
    for name in written:
        (folder / name).parent.mkdir(exist_ok=True)
        partial = folder / f".{Path(name).name}.partial-{secrets.token_hex(4)}"
        shutil.copyfile(new / name, partial)
        partial.replace(folder / name)
    for name in own.keys() - set(names):  # of a model that was there before
        (folder / name).unlink()
    write_manifest(folder, [*written, *(own.keys() & set(names))])
