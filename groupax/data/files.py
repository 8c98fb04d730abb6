"""Rows of datasets: files, folders and ids on the Hugging Face Hub. Imports no jax.

Arrow and Parquet give all rows of a column the same keys, so the arguments `{"city": "Paris"}` of a tool's call become
`{"city": "Paris", "query": None}` as soon as another row calls a tool with a query. Nulls of arguments in tables are
left out therefore, except in lists and in arguments that are JSON texts.
"""

import csv
import glob
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupax.core.settings.fields import nearest
from groupax.core.storage.folders import list_names
from groupax.core.terminal.printable import error_line
from groupax.data.chat import without_nulls
from groupax.data.images import absolute_paths


class TableRows:
    """Rows of a `datasets.Dataset` without the nulls of calls' arguments. Anything else is as in the dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: Any, /) -> Any:
        found = self._dataset[index]
        return list(map(calls_without_nulls, found)) if isinstance(index, str) else without_null_arguments(found)


def without_null_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of a table without the nulls of calls' arguments."""
    return {column: calls_without_nulls(value) for column, value in row.items()}


def calls_without_nulls(messages: Any) -> Any:
    """Returns messages without the nulls of their calls' arguments; any other value unchanged."""
    if not isinstance(messages, list):
        return messages
    has_calls = [isinstance(each, Mapping) and "tool_calls" in each for each in messages]
    return [
        {**each, "tool_calls": without_nulls(each["tool_calls"])} if has else each
        for each, has in zip(messages, has_calls, strict=True)
    ]


COMPRESSIONS = (".gz", ".zst", ".bz2")


def file_kind(path: Path) -> str | None:
    """Returns the kind of a file, a key of `READERS`, or None for a file without a reader."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in READERS else None


def read_file(path: Path, name: str) -> list[dict[str, Any]]:
    """Returns the rows of a file, whose paths of images, relative to the file's folder, become absolute."""
    kind = file_kind(path)
    if kind is None:
        raise ValueError(
            f"{name}: {path} is not a {KINDS} file; all but Parquet may be compressed as .gz, .zst or .bz2"
        )
    return absolute_paths(READERS[kind](path), path.absolute().parent)


def check_characters(value: Any, where: str) -> None:
    """Raises a ValueError if a text in a value has half of a surrogate pair, or the value is nested too deeply."""
    try:
        json.dumps(value, ensure_ascii=False, default=lambda _: None, skipkeys=True).encode()
    except UnicodeEncodeError as error:
        text = error.object[max(error.start - 20, 0) : error.end].encode(errors="backslashreplace").decode()
        raise ValueError(
            f"{where} has half of a surrogate pair, which is not a character, in ...{text!r}; remove it"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return [without_null_arguments(row) for row in pyarrow.parquet.read_table(path).to_pylist()]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a complete Parquet file: {error_line(error, 500)}") from error


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):  # strings may contain other line breaks
        if line.strip():
            row = _parse(line, f"{path}, line {number}")
            _check_row(row, f"{path}, line {number}")
            rows.append(row)
    return rows


def _read_json(path: Path) -> list[dict[str, Any]]:
    text = _read_text(path)
    if not text.strip():
        return []
    rows = _parse(text, str(path))
    if not isinstance(rows, list):
        keys = f" with the keys {', '.join(list(rows)[:5])}" if isinstance(rows, dict) else ""
        raise ValueError(f"{path} must contain a list of rows, it contains a {type(rows).__name__}{keys}")
    for index, row in enumerate(rows):
        _check_row(row, f"{path}, row {index}")
    return rows


def _read_csv(path: Path) -> list[dict[str, Any]]:
    """Reads a table whose first line names its columns; all values are texts."""
    delimiter = "\t" if file_kind(path) == ".tsv" else ","
    csv.field_size_limit(1 << 30)
    lines = csv.reader(io.StringIO(_read_text(path), newline=""), delimiter=delimiter, strict=True)
    rows: list[dict[str, Any]] = []
    try:
        names = next(lines, [])
        if len(set(names)) < len(names):
            raise ValueError(f"{path}: the first line names a column twice: {', '.join(names):.200}")
        for values in lines:
            if values and len(values) != len(names):
                raise ValueError(
                    f"{path}, line {lines.line_num} has {len(values)} values for {len(names)} columns "
                    f"({', '.join(names):.200}); put values with {delimiter!r} or line breaks in double quotes"
                )
            if values:
                rows.append(dict(zip(names, values, strict=True)))
    except csv.Error as error:
        raise ValueError(f"{path}, line {lines.line_num} is not valid CSV: {error}") from error
    return rows


# Readers by suffix.
READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
KINDS = f"{', '.join([*READERS][:-1])} or {[*READERS][-1]}"


def _read_text(path: Path) -> str:
    """Returns the text of a file that may be compressed and may start with a byte order mark."""
    import pyarrow

    try:
        if path.suffix.lower() in COMPRESSIONS:
            with pyarrow.input_stream(str(path), compression="detect") as stream:
                data = stream.read()
        else:
            data = path.read_bytes()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error_line(error, 500)}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {number} is not UTF-8 (the byte 0x{data[error.start]:02x}: {error.reason}); write the "
            "file in UTF-8"
        ) from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        has_lines = error.msg == "Extra data" and where.endswith(".json")
        hint = "; if it has a row on each line, name it .jsonl" if has_lines else ""
        raise ValueError(f"{where} is not valid JSON: {error}{hint}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{where} cannot be read: {error}") from error


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(
            f'{where}: a row must be an object like {{"prompt": "..."}}, this one is a '
            f"{type(row).__name__}: {row!r:.60}"
        )
    check_characters(row, where)


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
            files = sorted(Path(each) for each in glob.glob(str(path), recursive=True))  # noqa: PTH207 - may be absolute
            if not files:
                raise ValueError(f"{name}: no file matches {path}")
            return [row for each in files for row in read_file(each, name)]
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read: {error}") from error
    check_file(source, name)
    return _read_hub(str(source), name, splits, subset)


def check_file(source: str | os.PathLike[str], name: str) -> None:
    """Refuses a source that is named like a file of rows, but does not exist."""
    path = Path(source).expanduser()
    if file_kind(path) is not None and not path.exists() and not glob.has_magic(str(source)):
        near = nearest(path.name, [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else [])
        raise ValueError(f"{name}: there is no file {path}{near}")


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
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:  # of the hub: network, name, split, script
        raise ValueError(
            f"{name}: there is no file or folder {source}, and it cannot be downloaded from the hub: "
            f"{error_line(error, 500)}"
        ) from error
