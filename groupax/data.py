"""Datasets of prompts, and the order in which a run visits them. Imports no jax."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.config import PromptOrder, PromptOverflow
from groupax.tokenizer import encode_prompts

Example = Mapping[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet")
TRAIN_SPLITS = ("train",)
EVAL_SPLITS = ("test", "validation")


class MissingSplitError(ValueError):
    """A source of data has no split of the names asked for."""


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
    """Rows from a `datasets.Dataset`, a list of dicts, a file, a folder or a hub id.

    Args:
        dataset: where they are; for files, folders and hub ids see `read_rows`.
        name: what to call it in an error.
        splits: of a folder or hub id, the first that there is.

    Raises:
        ValueError: there are no rows, a row has no `prompt`, or the source cannot be read.
    """
    if isinstance(dataset, (str, os.PathLike)):
        dataset = read_rows(dataset, name, splits)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or isinstance(dataset, Mapping):
        found = f" with the splits {', '.join(dataset)}; pick one" if isinstance(dataset, Mapping) else ""
        raise ValueError(
            f"{name} must be a Dataset, a list of dicts, a file, a folder or a hub id, got {type(dataset)}{found}"
        )
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty")
    columns = getattr(dataset, "column_names", None)
    rows = [dict.fromkeys(columns)] if columns is not None else dataset
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or "prompt" not in row:
            found = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
            raise ValueError(
                f"{name} has no column 'prompt' (row {index} has {found}); rename the column with the prompts, or "
                "name a recipe that makes prompts of such rows"
            )
    return dataset if columns is not None else _with_all_columns(dataset)


def _with_all_columns(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The rows; if some lack columns that others have, with None in these, as `datasets` has it."""
    columns = dict.fromkeys(name for index in range(len(rows)) for name in rows[index])
    if all(len(rows[index]) == len(columns) for index in range(len(rows))):
        return rows
    return [{**columns, **rows[index]} for index in range(len(rows))]


def read_rows(
    source: str | os.PathLike[str], name: str, splits: Sequence[str] = TRAIN_SPLITS, subset: str | None = None
) -> Any:
    """The rows of a file, of a split of a folder, or of a split of a hub id.

    A folder's split is what its files are named for: `test.jsonl`, `data/test-00000-of-00002.parquet`; or it is a
    folder that `datasets` has written with `save_to_disk`.

    Args:
        source: a .jsonl, .json or .parquet file, a folder, or a hub id.
        name: what to call it in an error.
        splits: the first that there is, is read.
        subset: the configuration of a hub id that has several; in a folder the subfolder of that name, if there is one.

    Raises:
        MissingSplitError: there is none of these splits.
        ValueError: the source cannot be read.
    """
    path = Path(source).expanduser()
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise ValueError(f"{name}: there is no file {path}")
        return _read_file(path)
    if path.is_dir():
        return _read_folder(path, name, splits, subset)
    if path.exists():
        raise ValueError(f"{name}: {path} is not a .jsonl, .json or .parquet file")
    return _read_hub(str(source), name, splits, subset)


def _read_file(path: Path) -> Any:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return _parse_lines(text, path)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path} must hold a list of rows, it holds a {type(rows).__name__}")
    return rows


def _read_folder(folder: Path, name: str, splits: Sequence[str], subset: str | None) -> Any:
    if (folder / "dataset_dict.json").is_file():
        from datasets import load_from_disk

        saved: Any = load_from_disk(str(folder))
        return _pick(saved, splits, f"{name}: the folder {folder}")
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        from datasets import load_from_disk

        return load_from_disk(str(folder))
    folder = folder / subset if subset and (folder / subset).is_dir() else folder
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(re.split(r"[-.]", path.stem)[0], []).append(path)
    chosen = _pick(by_split, splits, f"{name}: the folder {folder}")
    return [row for path in chosen for row in _read_file(path)]


def _pick(by_split: Mapping[str, Any], splits: Sequence[str], where: str) -> Any:
    for split in splits:
        if split in by_split:
            return by_split[split]
    found = ", ".join(by_split) or "no .jsonl, .json or .parquet file"
    raise MissingSplitError(f"{where} has no split {' or '.join(splits)}, it has {found}; give the file itself")


def _read_hub(source: str, name: str, splits: Sequence[str], subset: str | None) -> Any:
    from datasets import get_dataset_split_names, load_dataset

    try:
        names = get_dataset_split_names(source, subset) if len(splits) > 1 else splits
        _pick(dict.fromkeys(names), splits, f"{name}: {source}")
        return load_dataset(source, subset, split=next(split for split in splits if split in names))
    except MissingSplitError:
        raise
    except (OSError, ValueError) as error:  # network, name and split faults of the hub's client
        raise ValueError(
            f"{name}: there is no file or folder {source}, and the hub does not give it: {error}"
        ) from error


def _parse_lines(text: str, path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # other line breaks may stand in strings
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from error
    return rows


def encode_examples(examples: Examples, tokenizer: Any, max_length: int, overflow: PromptOverflow) -> PromptSet:
    """Tokenize all prompts and apply the policy for those longer than `max_length` tokens.

    A column `prompt_ids` has the tokens of the prompts if they are others than the tokenizer would make.

    Raises:
        ValueError: a prompt is too long and the policy is "error", none is left after dropping, or one is empty.
    """
    columnar = hasattr(examples, "column_names")
    prompts = list(examples["prompt"]) if columnar else [examples[index]["prompt"] for index in range(len(examples))]
    if "prompt_ids" in examples[0]:
        token_ids = [np.asarray(examples[index]["prompt_ids"], np.int32) for index in range(len(examples))]
    else:
        token_ids = encode_prompts(tokenizer, prompts)
    for index, ids in enumerate(token_ids):
        if len(ids) == 0:
            raise ValueError(f"prompt {index} is empty and the tokenizer adds no token; the model needs at least one")
    too_long = [index for index, ids in enumerate(token_ids) if len(ids) > max_length]
    if not too_long:
        return PromptSet(examples, token_ids, max_length=max_length)
    if overflow == "error":
        first = too_long[0]
        raise ValueError(
            f"prompt {first} has {len(token_ids[first])} tokens, at most {max_length} are allowed ({len(too_long)} of "
            f"{len(examples)} prompts are too long): by max_prompt_length, or by what the completion leaves of the "
            "model's positions; change these, or set prompt_overflow to 'drop' or 'truncate_left'"
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
