"""Sources of rows: files, folders and ids on the Hugging Face Hub. Imports no jax."""

import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupax.data.files import KINDS, file_kind, read_file
from groupax.settings.fields import nearest
from groupax.storage.folders import list_names
from groupax.terminal.printable import error_line

TRAIN_SPLITS = ("train",)
EVAL_SPLITS = ("test", "validation")


class MissingSplitError(ValueError):
    """A source has none of the requested splits."""


def read_rows(
    source: str | os.PathLike[str], name: str, splits: Sequence[str] = TRAIN_SPLITS, subset: str | None = None
) -> Any:
    """Returns the rows of one or several files, or of a split of a folder or hub id.

    Files of a folder belong to the split that they are named after: `test.jsonl`, `data/test-00000-of-00002.parquet`.
    Folders that `datasets` wrote with `save_to_disk` are read too.

    Args:
        source: A file of a kind in `READERS`, which may be compressed; a pattern of such files, e.g. data/*.jsonl; a
            folder; or a hub id.
        name: Name of the source in an error.
        splits: Splits in order of preference; the first that exists is read.
        subset: Configuration of a hub id; in a folder, the subfolder of that name, if there is one.

    Raises:
        MissingSplitError: None of the splits exists.
        ValueError: The source cannot be read.
    """
    if not str(source).strip():
        raise ValueError(f"{name} is an empty text; name a file, a folder or a hub id, or leave it out")
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _read_folder(path, name, splits, subset)
        if path.is_file():
            return read_file(path, name)
        if path.exists():
            raise ValueError(f"{name}: {path} is neither a file nor a folder")
        if glob.has_magic(str(source)):
            return _read_pattern(path, name)
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read: {error}") from error
    check_file(source, name)
    return _read_hub(str(source), name, splits, subset)


def check_file(source: str | os.PathLike[str], name: str) -> None:
    """Refuses a source that is named like a file of rows, but does not exist.

    Args:
        source: A source as `read_rows` takes it.
        name: Name of the source in an error.

    Raises:
        ValueError: There is no such file; names the nearest one.
    """
    path = Path(source).expanduser()
    if file_kind(path) is not None and not path.exists() and not glob.has_magic(str(source)):
        near = nearest(path.name, [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else [])
        raise ValueError(f"{name}: there is no file {path}{near}")


def _read_pattern(pattern: Path, name: str) -> list[dict[str, Any]]:
    files = sorted(Path(path) for path in glob.glob(str(pattern), recursive=True))  # noqa: PTH207 - patterns may be absolute
    if not files:
        raise ValueError(f"{name}: no file matches {pattern}")
    return [row for path in files for row in read_file(path, name)]


def _read_folder(folder: Path, name: str, splits: Sequence[str], subset: str | None) -> Any:
    is_dict, is_one = (folder / "dataset_dict.json").is_file(), (folder / "dataset_info.json").is_file()
    if is_dict or (is_one and (folder / "state.json").is_file()):
        saved = _load_from_disk(folder, name)
        return _pick(saved, splits, f"{name}: the folder {folder}") if is_dict else saved
    folder = folder / subset if subset and (folder / subset).is_dir() else folder
    files = sorted(path for path in folder.rglob("*") if file_kind(path) is not None and path.is_file())
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(re.split(r"[-.]", path.name)[0], []).append(path)
    chosen = _pick(by_split, splits, f"{name}: the folder {folder}")
    return [row for path in chosen for row in read_file(path, name)]


def _load_from_disk(folder: Path, name: str) -> Any:
    import pyarrow
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"{name}: the folder {folder} is not a complete dataset of save_to_disk: {error_line(error, 500)}"
        ) from error


def _pick(by_split: Mapping[str, Any], splits: Sequence[str], where: str) -> Any:
    for split in splits:
        if split in by_split:
            return by_split[split]
    found = list_names(by_split) or f"no {KINDS} file"
    raise MissingSplitError(f"{where} has no split {' or '.join(splits)}, it has {found}; name the file itself")


def _read_hub(source: str, name: str, splits: Sequence[str], subset: str | None) -> Any:
    from datasets import get_dataset_split_names, load_dataset
    from datasets.exceptions import DatasetsError

    try:
        names = get_dataset_split_names(source, subset) if len(splits) > 1 else splits
        _pick(dict.fromkeys(names), splits, f"{name}: {source}")
        return load_dataset(source, subset, split=next(split for split in splits if split in names))
    except MissingSplitError:
        raise
    except (
        OSError,
        ValueError,
        RuntimeError,
        DatasetsError,
    ) as error:  # the hub's errors: network, name, split, script
        reason = error_line(error, 500)
        raise ValueError(
            f"{name}: there is no file or folder {source}, and it cannot be downloaded from the hub: {reason}"
        ) from error
