"""Datasets of prompts, and the order in which a run visits them. Imports no jax."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.config import PromptOrder, PromptOverflow
from groupax.tokenizer import encode_prompts

Example = Mapping[str, Any]


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
    """

    examples: Examples
    token_ids: Sequence[np.ndarray]
    num_dropped: int = 0
    num_truncated: int = 0

    def __len__(self) -> int:
        return len(self.examples)


def load_examples(dataset: Any, name: str = "train_dataset") -> Examples:
    """Rows from a `datasets.Dataset`, a list of dicts, a .jsonl, .json or .parquet file, or a hub id.

    Raises:
        ValueError: there are no rows, a row has no `prompt`, or the source cannot be read.
    """
    if isinstance(dataset, (str, os.PathLike)):
        dataset = _read(dataset, name)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or isinstance(dataset, Mapping):
        splits = f" with the splits {', '.join(dataset)}; pick one" if isinstance(dataset, Mapping) else ""
        raise ValueError(f"{name} must be a Dataset, a list of dicts, a file or a hub id, got {type(dataset)}{splits}")
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty")
    columns = getattr(dataset, "column_names", None)
    rows = [dict.fromkeys(columns)] if columns is not None else dataset
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or "prompt" not in row:
            found = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
            raise ValueError(
                f"{name} has no column 'prompt' (row {index} has {found}); rename the column with the prompts"
            )
    return dataset


def _read(source: str | os.PathLike[str], name: str) -> Any:
    path = Path(source)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise ValueError(f"{name}: there is no file {path}")
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        text = path.read_text(encoding="utf-8")
        return _parse_lines(text, path) if path.suffix == ".jsonl" else json.loads(text)
    if path.exists():
        raise ValueError(f"{name}: {path} is not a .jsonl, .json or .parquet file")
    from datasets import load_dataset

    try:
        return load_dataset(str(source), split="train")
    except (OSError, ValueError) as error:  # network, name and split faults of the hub's client
        raise ValueError(f"{name}: there is no file {source}, and the hub does not give it: {error}") from error


def _parse_lines(text: str, path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
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
        return PromptSet(examples, token_ids)
    if overflow == "error":
        first = too_long[0]
        raise ValueError(
            f"prompt {first} has {len(token_ids[first])} tokens, max_prompt_length is {max_length} "
            f"({len(too_long)} of {len(examples)} prompts are too long); raise it or set prompt_overflow to 'drop' "
            "or 'truncate_left'"
        )
    if overflow == "truncate_left":
        return PromptSet(examples, [ids[-max_length:] for ids in token_ids], num_truncated=len(too_long))
    kept = [index for index, ids in enumerate(token_ids) if len(ids) <= max_length]
    if not kept:
        raise ValueError(f"all {len(examples)} prompts are longer than max_prompt_length={max_length}; raise it")
    return PromptSet([examples[i] for i in kept], [token_ids[i] for i in kept], num_dropped=len(too_long))


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
