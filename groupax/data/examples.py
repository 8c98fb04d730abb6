"""Rows of data by index, of which each has a prompt. Imports no jax."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from groupax.data.files import check_texts
from groupax.data.sources import TRAIN_SPLITS, read_rows

Example = Mapping[str, Any]
MOST_ROWS = 50_000_000  # of a dataset that is no `datasets.Dataset` and is read whole
IMAGES = ("image", "images")


@runtime_checkable
class Examples(Protocol):
    """Rows by index: a list of dicts, or a `datasets.Dataset`."""

    def __len__(self) -> int:
        """How many rows there are."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """The row with that index."""
        ...


def load_examples(dataset: Any, name: str = "train_dataset", splits: Sequence[str] = TRAIN_SPLITS) -> Examples:
    """Returns the rows of a `datasets.Dataset`, of an object with rows by index, of files, of a folder or a hub id.

    Args:
        dataset: where they are: rows, e.g. a list of dicts; or a file, a pattern of files, a folder or a hub id (see
            `read_rows`), or a list of several of these.
        name: what to call it in an error.
        splits: of a folder or hub id, the first that there is.

    Raises:
        ValueError: there are no rows, a row has no `prompt`, there are images, or the source cannot be read.
    """
    name = describe_source(dataset, name)
    if isinstance(dataset, (str, os.PathLike)):
        dataset = read_rows(dataset, name, splits)
    elif _is_list_of_sources(dataset):
        parts = [load_examples(source, f"{name}, a list of files", splits) for source in dataset]
        dataset = [row for part in parts for row in _rows_by_index(part, name)]
    _check_kind(dataset, name)
    columns = getattr(dataset, "column_names", None)
    rows = dataset if columns is not None else _rows_by_index(dataset, name)
    if len(rows) == 0:
        raise ValueError(f"{name} is empty")
    for index, row in enumerate([dict.fromkeys(columns)] if columns is not None else rows):
        if not isinstance(row, Mapping) or "prompt" not in row:
            found = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            raise ValueError(
                f"{name} has no column 'prompt' (row {index} has {found:.200}); rename the column with the prompts, or "
                "name a recipe that makes prompts of such rows"
            )
        if columns is None:
            _check_row(row, f"{name}: row {index}")
    check_text_only(rows, name)
    return rows if columns is not None else _with_all_columns(rows)


def describe_source(dataset: Any, name: str) -> str:
    """Returns what to call a dataset in an error: its name, and where it comes from if that is a file or the like."""
    return f"{name} ({dataset})" if isinstance(dataset, (str, os.PathLike)) else name


def _is_list_of_sources(dataset: Any) -> bool:
    is_list = isinstance(dataset, (list, tuple)) and bool(dataset)
    return is_list and all(isinstance(source, (str, os.PathLike)) for source in dataset)


def _check_kind(dataset: Any, name: str) -> None:
    """Refuses what is no sequence of rows, with the way to make one."""
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        if "prompt" in dataset:
            advice = "is a mapping of columns; make it rows, as datasets.Dataset.from_dict does"
        else:
            advice = f"is a mapping with the splits {', '.join(map(str, dataset))}; pick one"
        raise ValueError(f"{name} {advice}")
    for method, way in {"to_dict": ".to_dict('records')", "to_pylist": ".to_pylist()"}.items():
        if hasattr(dataset, method) and hasattr(dataset, "columns"):
            raise ValueError(f"{name} is a {kind}, whose rows are not found by index; give {way} of it")
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, (bytes, set)):
        return
    if hasattr(dataset, "__iter__") and not isinstance(dataset, (bytes, set)):
        raise ValueError(
            f"{name} is a {kind}, which has no length: an epoch, a shuffled order and a resumed run need one. Give "
            "rows that were taken from it, e.g. list(itertools.islice(dataset, 10_000))"
        )
    raise ValueError(
        f"{name} must be a Dataset, a list of dicts, a file, a folder or a hub id, got {type(dataset)}; an object of "
        "your own needs __len__ and __getitem__"
    )


def _rows_by_index(dataset: Any, name: str) -> list[Any]:
    """Returns the rows 0 to len - 1, whatever iterating over the dataset would do."""
    try:
        num_rows = len(dataset)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} has no length that can be used: {error}") from error
    if num_rows > MOST_ROWS:
        raise ValueError(
            f"{name} has {num_rows:,} rows, at most {MOST_ROWS:,} are read into memory; give fewer, or a "
            "datasets.Dataset"
        )
    if isinstance(dataset, list):
        return dataset
    rows = []
    for index in range(num_rows):
        try:
            rows.append(dataset[index])
        except (IndexError, KeyError) as error:
            raise ValueError(f"{name} has a length of {num_rows}, but no row {index}: {error!r}") from error
    return rows


def _check_row(row: Mapping[Any, Any], where: str) -> None:
    unnamed = [column for column in row if not isinstance(column, str)]
    if unnamed:
        raise ValueError(f"{where} has a column whose name is no text: {unnamed[0]!r:.60}")
    check_texts(row, where)


def check_text_only(rows: Any, name: str) -> None:
    """Refuses rows with images, sounds or videos, which no model of groupax sees.

    Raises:
        ValueError: there are some.
    """
    features = getattr(rows, "features", None) or {}
    typed = [column for column, kind in features.items() if type(kind).__name__ in ("Image", "Audio", "Video")]
    columns = getattr(rows, "column_names", None)
    for column in IMAGES:
        if columns is None:
            found = any(isinstance(row, Mapping) and _is_there(row.get(column)) for row in rows)
        else:
            found = column in columns and column not in typed and any(map(_is_there, rows[column]))
        typed += [column] if found else []
    if typed:
        raise ValueError(
            f"{name} has a column {typed[0]!r}, which the model would not see: groupax has no vision or audio tower; "
            "drop the column to train on the text alone"
        )


def _is_there(value: Any) -> bool:
    return value is not None and not (isinstance(value, (str, list, tuple, dict)) and len(value) == 0)


def _with_all_columns(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns the rows; if some lack columns that others have, with None in these, as `datasets` has it."""
    columns = dict.fromkeys(name for row in rows for name in row)
    if all(len(row) == len(columns) for row in rows):
        return rows
    return [{**columns, **row} for row in rows]
