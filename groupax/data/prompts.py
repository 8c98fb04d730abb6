"""Datasets of prompts, and the order in which a run visits them. Imports no jax."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.config import PromptOrder, PromptOverflow
from groupax.data.files import TRAIN_SPLITS, check_texts, read_rows
from groupax.data.tokenizer import SPARE_TOKENS, encode_prompts, is_conversational
from groupax.settings.template_kwargs import check_template_kwargs

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


@dataclass(frozen=True, eq=False)
class PromptSet:
    """Prompts with their token ids.

    Attributes:
        examples: rows with a `prompt` and any further columns.
        token_ids: of each prompt.
        num_dropped: prompts left out because they were too long.
        num_truncated: prompts whose beginning was cut off.
        max_length: the longest prompt allowed, in tokens.
    """

    examples: Examples
    token_ids: Sequence[np.ndarray]
    num_dropped: int = 0
    num_truncated: int = 0
    max_length: int = 0

    def __len__(self) -> int:
        return len(self.examples)


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
    name = named_source(dataset, name)
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
    refuse_images(rows, name)
    return rows if columns is not None else _with_all_columns(rows)


def named_source(dataset: Any, name: str) -> str:
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


def refuse_images(rows: Any, name: str) -> None:
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


def encode_examples(
    examples: Examples,
    tokenizer: Any,
    max_length: int,
    overflow: PromptOverflow,
    template_kwargs: Mapping[str, Any] | None = None,
    name: str = "",
) -> PromptSet:
    """Tokenizes all prompts and applies the policy for those longer than `max_length` tokens.

    A column `prompt_ids` has the tokens of the prompts if they are others than the tokenizer would make, and a column
    `chat_template_kwargs` arguments for the chat template, which go before those in `template_kwargs`.

    Args:
        examples: rows with a column `prompt`.
        tokenizer: of the model.
        max_length: in tokens.
        overflow: the policy.
        template_kwargs: arguments for the chat template.
        name: what to call the dataset in an error.

    Raises:
        ValueError: a prompt is too long and the policy is "error", none is left after dropping, one is empty, or one
            cannot be written (see `encode_prompts`).
    """
    prompt = f"{name}: prompt" if name else "prompt"
    columnar = hasattr(examples, "column_names")
    prompts = list(examples["prompt"]) if columnar else [examples[index]["prompt"] for index in range(len(examples))]
    if "prompt_ids" in examples[0]:
        ids = [examples[index]["prompt_ids"] for index in range(len(examples))]
        token_ids = [_given_ids(each, f"{prompt} {index}") for index, each in enumerate(ids)]
        if template_kwargs:
            raise ValueError(
                f"{name or 'the dataset'} has a column prompt_ids, which chat_template_kwargs cannot change; leave "
                "one of them out"
            )
    else:
        arguments = _template_kwargs(examples, prompts, template_kwargs or {}, prompt)
        token_ids = encode_prompts(tokenizer, prompts, arguments, max_length, prompt)
    for index, ids in enumerate(token_ids):
        if len(ids) == 0:
            raise ValueError(f"{prompt} {index} is empty and the tokenizer adds no token; the model needs at least one")
    too_long = [index for index, ids in enumerate(token_ids) if len(ids) > max_length]
    if not too_long:
        return PromptSet(examples, token_ids, max_length=max_length)
    if overflow == "error":
        first = too_long[0]
        most = max_length + SPARE_TOKENS  # of longer ones only the end may have been encoded
        length = len(token_ids[first])
        raise ValueError(
            f"{prompt} {first} has {length if length <= most else f'more than {most}'} tokens, at most {max_length} "
            f"are allowed ({len(too_long)} of {len(examples)} prompts are too long): by max_prompt_length, or by what "
            "the completion leaves of the model's positions; change these, or set prompt_overflow to 'drop' or "
            "'truncate_left'"
        )
    if overflow == "truncate_left":
        cut = [ids[-max_length:] for ids in token_ids]
        return PromptSet(examples, cut, num_truncated=len(too_long), max_length=max_length)
    kept = [index for index, ids in enumerate(token_ids) if len(ids) <= max_length]
    if not kept:
        raise ValueError(
            f"all {len(examples)} prompts are longer than {max_length} tokens, which max_prompt_length allows, or what "
            "the completion leaves of the model's positions; change these"
        )
    rows, ids = [examples[i] for i in kept], [token_ids[i] for i in kept]
    return PromptSet(rows, ids, num_dropped=len(too_long), max_length=max_length)


def _given_ids(given: Any, name: str) -> np.ndarray:
    try:
        ids = np.asarray(given)
    except ValueError:  # rows of unequal lengths
        ids = np.zeros((0, 0))
    is_ids = ids.ndim == 1 and (ids.size == 0 or (np.issubdtype(ids.dtype, np.integer) and ids.min() >= 0))
    if not is_ids or (ids.size and ids.max() >= 1 << 31):
        raise ValueError(f"{name}: the column prompt_ids must have a list of token ids, got {given!r:.100}")
    return ids.astype(np.int32)


def _template_kwargs(
    examples: Examples, prompts: Sequence[Any], shared: Mapping[str, Any], name: str
) -> list[dict[str, Any]] | None:
    """Returns each prompt's arguments for the chat template, or None if there are none.

    Raises:
        ValueError: a row's are no mapping, or no prompt goes through a chat template.
    """
    if shared and not any(map(is_conversational, prompts)):
        raise ValueError(
            f"chat_template_kwargs has {', '.join(shared)}, but no prompt is a list of messages, which alone a chat "
            "template writes; leave them out, or give such prompts"
        )
    if not shared and "chat_template_kwargs" not in examples[0]:
        return None
    arguments = []
    for index, prompt in enumerate(prompts):
        row = examples[index]
        if row.get("chat_template_kwargs") is not None:
            check_template_kwargs(row["chat_template_kwargs"], f"{name} {index}: chat_template_kwargs")
        arguments.append({**(shared if is_conversational(prompt) else {}), **own_template_kwargs(row)})
    return arguments


def own_template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row's own arguments for the chat template; None stands for one that it does not have, as in tables."""
    return {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}


def prompt_limit(max_positions: int, max_completion_length: int, max_prompt_length: int | None, name: str) -> int:
    """The longest prompt allowed, in tokens: what the completion leaves of the model's positions, or less.

    Args:
        max_positions: of the model.
        max_completion_length: in tokens.
        max_prompt_length: None for no limit but the model's.
        name: what the completion's limit is called in an error.

    Raises:
        ValueError: nothing is left.
    """
    context = max_positions - max_completion_length
    limit = min(context, max_prompt_length or context)
    if limit < 1:
        raise ValueError(
            f"{name} {max_completion_length} leaves no room for a prompt in the model's {max_positions} positions; "
            "lower it"
        )
    return limit


def visit_order(
    num_examples: int,
    start: int,
    count: int,
    seed: int,
    order: PromptOrder = "shuffled",
    per_epoch: int | None = None,
) -> list[int]:
    """The examples at positions start .. start + count - 1 of the run: a new permutation for every epoch.

    A pure function, so that a resumed run needs no iterator state.

    Args:
        num_examples: in the dataset.
        start: first position.
        count: of positions.
        seed: of the permutations.
        order: which permutations.
        per_epoch: positions of an epoch, if it leaves out the last of its permutation.
    """
    per_epoch = per_epoch or num_examples
    places = [divmod(position, per_epoch) for position in range(start, start + count)]
    permutations = {epoch: _PERMUTATIONS[order](num_examples, seed, epoch) for epoch in {epoch for epoch, _ in places}}
    return [int(permutations[epoch][index]) for epoch, index in places]


def _shuffled(num: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num)


def _as_they_stand(num: int, _seed: int, _epoch: int) -> np.ndarray:
    return np.arange(num)


@lru_cache(maxsize=2)
def _shuffled_by_torch(num: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation that call number `epoch` of `torch.randperm(num, generator)` gives after `manual_seed(seed)`.

    PyTorch draws 32 bits of MT19937 for each place but the last, and swaps it with one of those from it on.
    """
    bits = np.random.RandomState(seed)._bit_generator  # seeded as PyTorch seeds it
    draws = bits.random_raw((epoch + 1) * (num - 1))[epoch * (num - 1) :]
    permutation = np.arange(num)
    for place, draw in enumerate(draws):
        other = place + int(draw) % (num - place)
        permutation[place], permutation[other] = permutation[other], permutation[place]
    return permutation


# By `GRPOConfig.prompt_order`.
_PERMUTATIONS: dict[PromptOrder, Callable[[int, int, int], np.ndarray]] = {
    "shuffled": _shuffled,
    "shuffled_by_torch": _shuffled_by_torch,
    "dataset": _as_they_stand,
}
