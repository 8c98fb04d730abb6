"""Files, folders and hub ids with rows of data. Imports no jax."""

import csv
import glob
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupax.settings.fields import nearest

COMPRESSIONS = (".gz", ".zst", ".bz2")
TRAIN_SPLITS = ("train",)
EVAL_SPLITS = ("test", "validation")
BYTE_ORDER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class MissingSplitError(ValueError):
    """A source of data has no split of the names asked for."""


def read_rows(
    source: str | os.PathLike[str], name: str, splits: Sequence[str] = TRAIN_SPLITS, subset: str | None = None
) -> Any:
    """Returns the rows of a file or of several, of a split of a folder, or of a split of a hub id.

    A folder's split is what its files are named for: `test.jsonl`, `data/test-00000-of-00002.parquet`; or it is a
    folder that `datasets` has written with `save_to_disk`.

    Args:
        source: a file of one of the kinds in `READERS`, which may be compressed; a pattern of such, e.g. data/*.jsonl;
            a folder; or a hub id.
        name: what to call it in an error.
        splits: the first that there is, is read.
        subset: the configuration of a hub id that has several; in a folder the subfolder of that name, if there is one.

    Raises:
        MissingSplitError: there is none of these splits.
        ValueError: the source cannot be read.
    """
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
    if kind_of(path) is not None:
        near = nearest(path.name, [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else [])
        raise ValueError(f"{name}: there is no file {path}{near}")
    return _read_hub(str(source), name, splits, subset)


def kind_of(path: Path) -> str | None:
    """Returns the kind of a file that rows are read from, as `READERS` has it, or None."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in READERS else None


def read_file(path: Path, name: str) -> list[dict[str, Any]]:
    """Returns the rows of a file.

    Raises:
        ValueError: it is of no kind in `READERS`, or it is damaged. Names the line.
    """
    kind = kind_of(path)
    if kind is None:
        raise ValueError(
            f"{name}: {path} is not a {KINDS} file (or one of the first four compressed as .gz, .zst or .bz2)"
        )
    return READERS[kind](path)


def check_texts(row: Any, where: str) -> None:
    """Checks that all texts in a row are of characters.

    Raises:
        ValueError: one has half of a surrogate pair, or the row has too many levels. Says where.
    """
    try:
        _check_value(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; remove it") from error
    except RecursionError as error:
        raise ValueError(f"{where} has values within values of too many levels") from error


def _check_value(value: Any) -> None:
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                text = value[max(error.start - 20, 0) : error.end].encode(errors="backslashreplace").decode()
                raise ValueError(f"it has half of a surrogate pair, which is no character, in ...{text!r}") from error
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check_value(key)
            _check_value(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_value(inner)


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no whole Parquet file: {_line(error)}") from error


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_text_of(path).split("\n"), start=1):  # other line breaks may stand in strings
        if line.strip():
            row = _parsed(line, f"{path}, line {number}")
            _check_row(row, f"{path}, line {number}")
            rows.append(row)
    return rows


def _read_json(path: Path) -> list[dict[str, Any]]:
    text = _text_of(path)
    if not text.strip():
        return []
    rows = _parsed(text, str(path))
    if not isinstance(rows, list):
        keys = f" with the keys {', '.join(list(rows)[:5])}" if isinstance(rows, dict) else ""
        raise ValueError(f"{path} must hold a list of rows, it holds a {type(rows).__name__}{keys}")
    for index, row in enumerate(rows):
        _check_row(row, f"{path}, row {index}")
    return rows


def _read_csv(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a table with a line of names; all values are texts."""
    delimiter = "\t" if kind_of(path) == ".tsv" else ","
    csv.field_size_limit(1 << 30)
    lines = csv.reader(io.StringIO(_text_of(path), newline=""), delimiter=delimiter, strict=True)
    rows: list[dict[str, Any]] = []
    try:
        names = next(lines, [])
        if len(set(names)) < len(names):
            raise ValueError(f"{path}: its first line names a column twice: {', '.join(names):.200}")
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


# How each kind of file is read, by its suffix.
READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
KINDS = f"{', '.join([*READERS][:-1])} or {[*READERS][-1]}"


def _text_of(path: Path) -> str:
    """Returns the text of a file that may be compressed and may begin with a byte order mark."""
    import pyarrow

    try:
        if path.suffix.lower() in COMPRESSIONS:
            with pyarrow.input_stream(str(path), compression="detect") as stream:
                data = stream.read()
        else:
            data = path.read_bytes()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {_line(error)}") from error
    coding = BYTE_ORDER_MARKS.get(data[:2])
    try:
        if coding is None:
            return data.decode("utf-8-sig")
        raise ValueError(f"{path} is {coding}; write it in UTF-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {number} is not UTF-8 (the byte 0x{data[error.start]:02x}: {error.reason}); write the "
            "file in UTF-8"
        ) from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and where.endswith(".json"):
            raise ValueError(
                f"{where} is not valid JSON: {error}; if it has a row on each line, name it .jsonl"
            ) from error
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{where} has values within values of too many levels") from error
    except ValueError as error:  # a number of thousands of digits, or a key twice
        raise ValueError(f"{where} cannot be read: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.60} stands twice in one object; rename or remove one")
    return made


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(
            f'{where}: a row must be an object like {{"prompt": "..."}}, this one is a '
            f"{type(row).__name__}: {row!r:.60}"
        )
    check_texts(row, where)


def _read_pattern(pattern: Path, name: str) -> list[dict[str, Any]]:
    files = sorted(Path(path) for path in glob.glob(str(pattern), recursive=True))  # noqa: PTH207 - of an absolute pattern too
    if not files:
        raise ValueError(f"{name}: no file has a name like {pattern}")
    return [row for path in files for row in read_file(path, name)]


def _read_folder(folder: Path, name: str, splits: Sequence[str], subset: str | None) -> Any:
    is_dict, is_one = (folder / "dataset_dict.json").is_file(), (folder / "dataset_info.json").is_file()
    if is_dict or (is_one and (folder / "state.json").is_file()):
        saved = _load_from_disk(folder, name)
        return _pick(saved, splits, f"{name}: the folder {folder}") if is_dict else saved
    folder = folder / subset if subset and (folder / subset).is_dir() else folder
    files = sorted(path for path in folder.rglob("*") if kind_of(path) is not None and path.is_file())
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
            f"{name}: the folder {folder} is not a whole dataset of save_to_disk: {_line(error)}"
        ) from error


def _pick(by_split: Mapping[str, Any], splits: Sequence[str], where: str) -> Any:
    for split in splits:
        if split in by_split:
            return by_split[split]
    found = ", ".join(by_split) or f"no {KINDS} file"
    raise MissingSplitError(f"{where} has no split {' or '.join(splits)}, it has {found}; give the file itself")


def _read_hub(source: str, name: str, splits: Sequence[str], subset: str | None) -> Any:
    from datasets import get_dataset_split_names, load_dataset
    from datasets.exceptions import DatasetsError

    try:
        names = get_dataset_split_names(source, subset) if len(splits) > 1 else splits
        _pick(dict.fromkeys(names), splits, f"{name}: {source}")
        return load_dataset(source, subset, split=next(split for split in splits if split in names))
    except MissingSplitError:
        raise
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:  # network, name, split and script of the hub's
        raise ValueError(
            f"{name}: there is no file or folder {source}, and the hub does not give it: {_line(error)}"
        ) from error


def _line(error: Exception) -> str:
    """Returns an error's text in one line."""
    return " ".join(str(error).split())[:500]
