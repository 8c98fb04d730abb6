"""Readers of files with rows: JSON Lines, JSON, CSV, TSV and Parquet. Imports no jax."""

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from groupax.data.images import absolute_paths
from groupax.data.table_nulls import shape_of, without_added_nulls
from groupax.terminal.printable import error_line

COMPRESSIONS = (".gz", ".zst", ".bz2")
BYTE_ORDER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def file_kind(path: Path) -> str | None:
    """Returns the kind of a file, a key of `READERS`, or None for a file without a reader."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in READERS else None


def read_file(path: Path, name: str) -> list[dict[str, Any]]:
    """Returns the rows of a file, in which paths of images are absolute; in the file they are relative to its folder.

    Raises:
        ValueError: The file is of no kind in `READERS`, or it is damaged. The message names the line.
    """
    kind = file_kind(path)
    if kind is None:
        raise ValueError(
            f"{name}: {path} is not a {KINDS} file; all but Parquet may be compressed as .gz, .zst or .bz2"
        )
    return absolute_paths(READERS[kind](path), path.absolute().parent)


def check_characters(value: Any, where: str) -> None:
    """Checks that all texts in a value, such as a row, consist of valid characters.

    Raises:
        ValueError: A text has half of a surrogate pair, or the value is nested too deeply.
    """
    try:
        _check_value(value)
    except ValueError as error:
        raise ValueError(f"{where} {error}; remove it") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error


def _check_value(value: Any) -> None:
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                text = value[max(error.start - 20, 0) : error.end].encode(errors="backslashreplace").decode()
                raise ValueError(f"has half of a surrogate pair, which is no character, in ...{text!r}") from error
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
        table = pyarrow.parquet.read_table(path)
        shape = shape_of(table.schema)
        return [dict(without_added_nulls(row, shape)) for row in table.to_pylist()]
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


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and where.endswith(".json"):
            raise ValueError(
                f"{where} is not valid JSON: {error}; if it has a row on each line, name it .jsonl"
            ) from error
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits, or a key twice
        raise ValueError(f"{where} cannot be read: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.60} is in one object twice; rename or remove one")
    return result


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(
            f'{where}: a row must be an object like {{"prompt": "..."}}, this one is a '
            f"{type(row).__name__}: {row!r:.60}"
        )
    check_characters(row, where)
