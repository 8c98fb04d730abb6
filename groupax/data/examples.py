"""Datasets: rows by index that each have a prompt, and the order in which a run visits them. Imports no jax."""

import json
import os
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.core.settings.run import PromptOrder
from groupax.data.chat import without_nulls
from groupax.data.files import TRAIN_SPLITS, TableRows, check_characters, read_rows
from groupax.data.images import COLUMNS as IMAGES
from groupax.data.images import absolute_paths, has_images, images_of, is_filled, named, unnamed

Example = Mapping[str, Any]


@runtime_checkable
class Examples(Protocol):
    """Rows by index: a list of dicts, or a `datasets.Dataset`."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """Returns the row with an index."""
        ...


def with_values(row: Example, values: Mapping[str, Any]) -> Example:
    """Returns a dataset's row with values in place of its own, which can still be taken apart."""
    return ChainMap(dict(values), dict(row))


def values_as_json(example: Example) -> str | None:
    """Returns the values that `with_values` has given a row, as JSON; None if there are none."""
    if not isinstance(example, ChainMap) or not example.maps[0]:
        return None
    return json.dumps(named(example.maps[0]), default=repr)


def with_values_from_json(row: Example, text: str | None) -> Example:
    """Returns a dataset's row with the values that `values_as_json` has written; None are none."""
    if text is None:
        return row
    return with_values(row, unnamed(json.loads(text), images_of(row) if has_images(row) else []))


def load_examples(
    dataset: Any,
    name: str = "train_dataset",
    splits: Sequence[str] = TRAIN_SPLITS,
    columns: Sequence[str] = ("prompt",),
    may_have_images: bool = False,
) -> Examples:
    """Returns the rows of a `datasets.Dataset`, an object with rows by index, files, a folder or a hub id.

    `dataset` has rows, e.g. a list of dicts; or it is a file, a pattern of files, a folder or a hub id (see
    `read_rows`), or a list of several of these. Each row needs one of the columns.
    """
    name = describe_source(dataset, name)
    if isinstance(dataset, (str, os.PathLike)):
        dataset = read_rows(dataset, name, splits)
    elif isinstance(dataset, (list, tuple)) and dataset and all(isinstance(x, (str, os.PathLike)) for x in dataset):
        each_name = f"{name}, a list of files"
        tables = [load_examples(source, each_name, splits, columns, may_have_images) for source in dataset]
        dataset = [row for table in tables for row in _rows_by_index(table, name)]
    _check_type(dataset, name)
    named = getattr(dataset, "column_names", None)
    if named is not None and {*columns}.isdisjoint(named) and getattr(dataset, "format", {}).get("type") == "custom":
        named = None  # `with_transform` makes the columns, row by row
    rows = dataset if named is not None else _rows_by_index(dataset, name)
    if len(rows) == 0:
        raise ValueError(f"{name} is empty")
    for index, row in enumerate([dict.fromkeys(named)] if named is not None else rows):
        if not isinstance(row, Mapping) or not any(column in row for column in columns):
            found = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            if tuple(columns) != ("prompt",):
                raise ValueError(
                    f"{name} has none of the columns {', '.join(columns)} (row {index} has {found:.200}); rename the "
                    "column with the examples"
                )
            raise ValueError(
                f"{name} has no column 'prompt' (row {index} has {found:.200}); rename the column with the prompts, or "
                "name a recipe that turns such rows into prompts"
            )
        if named is None:
            _check_row(row, f"{name}: row {index}")
    check_text_only(rows, name, may_have_images)
    if named is None:
        return _with_all_columns(absolute_paths(rows, Path.cwd()) if may_have_images else rows)
    is_plain = getattr(rows, "format", {}).get("type") is None  # a transform may give other rows
    has_calls = "tool_calls" in str(getattr(rows, "features", ""))
    return TableRows(rows) if is_plain and has_calls else rows


def describe_source(dataset: Any, name: str) -> str:
    """Returns the name of a dataset in an error, followed by its source if that is a path or a hub id."""
    return f"{name} ({dataset})" if isinstance(dataset, (str, os.PathLike)) else name


def check_text_only(rows: Any, name: str, may_have_images: bool = False) -> None:
    """Refuses rows with sounds or videos, which no model of groupax reads, and rows with images."""
    features = getattr(rows, "features", None) or {}
    media = [column for column, kind in features.items() if type(kind).__name__ in ("Image", "Audio", "Video")]
    if may_have_images:
        media = [column for column in media if column not in IMAGES or type(features[column]).__name__ != "Image"]
    else:
        media += image_columns(rows)
    if media:
        raise ValueError(
            f"{name} has a column {media[0]!r}, which the model would not see: it reads text"
            f"{', and images in a column image or images' if may_have_images else ''}; drop the column to train "
            "without it, or give a model that sees images"
        )


def image_columns(rows: Any) -> list[str]:
    """Returns the columns `image` and `images` that some row has an image in."""
    columns = getattr(rows, "column_names", None)
    if columns is None:
        mappings = [row for index in range(len(rows)) if isinstance(row := rows[index], Mapping)]
        return [column for column in IMAGES if any(is_filled(row.get(column)) for row in mappings)]
    features = getattr(rows, "features", None) or {}
    known = [column for column in IMAGES if column in columns]
    return [column for column in known if _is_media(features.get(column)) or any(map(is_filled, rows[column]))]


def _is_media(kind: Any) -> bool:
    """Returns whether a feature of `datasets` is an image or a list of images, whose values need not be decoded."""
    of = kind[0] if isinstance(kind, list) and kind else getattr(kind, "feature", kind)
    return type(of).__name__ == "Image"


def _check_type(dataset: Any, name: str) -> None:
    """Refuses an object that is not a sequence of rows, and says how to turn it into one."""
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"{name} is a mapping with the keys {', '.join(map(str, dataset))}; pick a split, or give rows"
        )
    for method, call in {"to_dict": ".to_dict('records')", "to_pylist": ".to_pylist()"}.items():
        if hasattr(dataset, method) and hasattr(dataset, "columns"):
            raise ValueError(f"{name} is a {kind}, whose rows have no index; pass the result of its {call}")
    if isinstance(dataset, (bytes, set)) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{name} must be a Dataset, a list of dicts, a file, a folder or a hub id, got a {kind}; another object "
            "needs __len__ and __getitem__: give a stream as rows, e.g. list(itertools.islice(dataset, 10_000))"
        )


def _rows_by_index(dataset: Any, name: str) -> list[Any]:
    """Returns the rows 0 to len - 1, which iterating over the dataset may not."""
    try:
        num_rows = len(dataset)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} has no usable length: {error}") from error
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
        raise ValueError(f"{where} has a column whose name is not a text: {unnamed[0]!r:.60}")
    check_characters(row, where)


def _with_all_columns(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns rows that all have the same columns, with None for missing values, as in `datasets`."""
    columns = dict.fromkeys(name for row in rows for name in row)
    if all(len(row) == len(columns) for row in rows):
        return rows
    return [{**columns, **row} for row in rows]


def visit_order(
    num_examples: int,
    start: int,
    count: int,
    seed: int,
    order: PromptOrder = "shuffled",
    per_epoch: int | None = None,
) -> list[int]:
    """Returns the examples at positions start .. start + count - 1 of a run, with a new permutation for every epoch.

    It is a pure function, so that a resumed run needs no iterator state. An epoch of `per_epoch` positions leaves out
    the end of its permutation.
    """
    per_epoch = per_epoch or num_examples
    positions = [divmod(position, per_epoch) for position in range(start, start + count)]
    epochs = {epoch for epoch, _ in positions}
    permutations = {epoch: _PERMUTATIONS[order](num_examples, seed, epoch) for epoch in epochs}
    return [int(permutations[epoch][index]) for epoch, index in positions]


@lru_cache(maxsize=2)
def _shuffled(num: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num)


@lru_cache(maxsize=2)
def _shuffled_by_torch(num: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the result of call number `epoch` of `torch.randperm(num, generator)` after `manual_seed(seed)`.

    PyTorch draws 32 bits of MT19937 for each index but the last, and swaps its entry with one at or after it.
    """
    bits = np.random.RandomState(seed)._bit_generator  # seeded as PyTorch seeds it
    draws = bits.random_raw((epoch + 1) * (num - 1))[epoch * (num - 1) :]
    permutation = np.arange(num)
    for index, draw in enumerate(draws):
        other = index + int(draw) % (num - index)
        permutation[index], permutation[other] = permutation[other], permutation[index]
    return permutation


# By `GRPOConfig.prompt_order`.
_PERMUTATIONS: dict[PromptOrder, Callable[[int, int, int], np.ndarray]] = {
    "shuffled": _shuffled,
    "shuffled_by_torch": _shuffled_by_torch,
    "seeded_by_epoch": lambda num, seed, epoch: _shuffled_by_torch(num, seed + epoch, 0),
    "dataset": lambda num, _seed, _epoch: np.arange(num),
}


Schemas = list[Mapping[str, Any]]


def tools_of_rows(
    examples: Examples, of_run: Sequence[Sequence[Mapping[str, Any]]] | None, has_environment: bool, name: str
) -> Sequence[Sequence[Mapping[str, Any]]] | None:
    """Returns the tools that each row's prompt describes, as schemas in OpenAI's format; None if none has any.

    Without tools of the run they are those of a column `tools`, as a list or as JSON. Nothing runs them, so that an
    episode has one turn, and reward functions judge the calls.
    """
    given = [examples[index].get("tools") for index in range(len(examples))] if "tools" in examples[0] else []
    if not any(value is not None for value in given):
        return of_run
    if of_run is not None or has_environment:
        raise ValueError(
            "the dataset has a column tools, whose tools nothing would run, and the run has tools or environments of "
            "its own; drop or rename the column"
        )
    return [_schemas(value, f"{name} {index}") for index, value in enumerate(given)]


def _schemas(value: Any, name: str) -> Schemas:
    if value is None:
        return []
    try:
        found = json.loads(value) if isinstance(value, str) else list(value)
    except (ValueError, TypeError, RecursionError):
        found = None
    schemas = found if isinstance(found, list) else [None]
    if not all(isinstance(each, Mapping) and isinstance(each.get("function", each), Mapping) for each in schemas):
        raise ValueError(
            f"{name}: the column tools must have a list of schemas in OpenAI's format, or the JSON of one, got "
            f"{value!r:.100}; rename the column if it is for something else"
        )
    return [without_nulls(each) for each in schemas]
