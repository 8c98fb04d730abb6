"""The rollout logs of steps, read on request, and their texts as the page shows them."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from groupax.core.types import TRUNCATIONS
from groupax.satellites.view.runs import NotFoundError

PREVIEW_CHARACTERS = 320
SHOWN_CHARACTERS = 20_000  # of a text, until the full text is requested
NEEDED = ("prompt", "completion", "prompt_index", "sample_index")
TEXTS = ["prompt", "completion"]  # stay dictionaries, as they are stored: a small file may repeat a long text often
REWARD = "rewards/"
MAX_CACHED_BYTES = 64 << 20  # of steps in memory; the one that was used last stays, whatever its size


@dataclass(frozen=True)
class Step:
    """The rollouts of one step, without the per-token columns.

    Attributes:
        table: Table with one row per completion.
        prompt_index: [B] int64.
        rewards: [B] float64 by reward function, NaN where a function does not apply.
        total: [B] float64, weighted sum of the rewards that apply, NaN if none does.
        advantage: [B] float64, NaN if unknown.
        truncated: [B] bool, whether a limit ended the completion.
        num_tokens: [B] int64, number of sampled tokens.
    """

    table: pyarrow.Table
    prompt_index: np.ndarray
    rewards: Mapping[str, np.ndarray]
    total: np.ndarray
    advantage: np.ndarray
    truncated: np.ndarray
    num_tokens: np.ndarray

    def rows_of(self, prompt_index: int) -> np.ndarray:
        """Returns the row indices of a prompt.

        Raises:
            NotFoundError: The step does not have the prompt.
        """
        rows = np.flatnonzero(self.prompt_index == prompt_index)
        if not rows.size:
            raise NotFoundError(f"this step has no prompt {prompt_index}; it has {len(np.unique(self.prompt_index))}")
        return rows

    def text(self, name: str, row: int, limit: int | None = None) -> tuple[str, int]:
        """Returns a text, at most `limit` bytes of it, and the number of bytes of the full text."""
        return scalar_text(self.table.column(name)[row], limit)

    def value(self, name: str, row: int) -> Any:
        """Returns a value of a column; None if the step does not have the column."""
        return self.table.column(name)[row].as_py() if name in self.table.column_names else None


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a rollout log; whatever a damaged file, or one of another program, raises in the block names the file.

    Raises:
        ValueError: The file cannot be read as a rollout log.
    """
    try:
        with pyarrow.parquet.ParquetFile(path, read_dictionary=TEXTS) as file:
            yield file
    except NotFoundError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        TypeError,
        ValueError,
        pyarrow.ArrowException,
    ) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def read_step(path: Path, weights: Sequence[float] | None = None) -> Step:
    """Reads a step's rollouts, without the per-token columns.

    Args:
        path: Path of the rollout log.
        weights: Weights of the reward functions in the order of their columns; 1 each if None or of another length.

    Raises:
        ValueError: The file is damaged or is not a rollout log.
    """
    with opened(path) as file:
        schema = file.schema_arrow
        flat = [item.name for item in schema if not pyarrow.types.is_nested(item.type) or item.name == "images"]
        missing = [name for name in NEEDED if name not in flat]
        if missing:
            raise ValueError(f"it is not a rollout log: it has no column {', '.join(missing)}")
        table = file.read(columns=flat, use_threads=False)
        indices = table.column("prompt_index").cast(pyarrow.int64())
        if indices.null_count:
            raise ValueError("a row has no prompt_index")
        names = [name for name in flat if name.startswith(REWARD)]
        rewards = {name.removeprefix(REWARD): floats(table.column(name)) for name in names}
        reasons = table.column("finish_reason").to_pylist() if "finish_reason" in flat else []
        return Step(
            table=table,
            prompt_index=indices.to_numpy(),
            rewards=rewards,
            total=weighted_total(list(rewards.values()), weights, table.num_rows),
            advantage=floats(table.column("advantage")) if "advantage" in flat else np.full(table.num_rows, np.nan),
            truncated=np.array([reason in TRUNCATIONS for reason in reasons] or [False] * table.num_rows, bool),
            num_tokens=completion_lengths(file, schema, table.num_rows),
        )


def read_texts(path: Path) -> tuple[list[str], Any]:
    """Returns a step's different prompts, and an array of its completions: all that most searches need.

    Raises:
        ValueError: The file is damaged or is not a rollout log.
    """
    with opened(path) as file:
        table = file.read(columns=TEXTS, use_threads=False)
        return [scalar_text(prompt, None)[0] for prompt in table.column("prompt").unique()], table.column("completion")


_cached: dict[tuple[Any, ...], Step] = {}  # by file, its version and the weights; the step that was used last is last
_caching = threading.Lock()


def cached_step(path: Path, weights: Sequence[float] | None) -> Step:
    """Returns `read_step`; the steps that were used last are kept until their file or the weights change."""
    key = path, path.stat().st_mtime_ns, None if weights is None else tuple(weights)
    with _caching:
        step = _cached.pop(key, None)
    step = step or read_step(path, weights)
    with _caching:
        _cached[key] = step
        while len(_cached) > 1 and sum(each.table.nbytes for each in _cached.values()) > MAX_CACHED_BYTES:
            del _cached[next(iter(_cached))]
    return step


def weighted_total(columns: Sequence[np.ndarray], weights: Sequence[float] | None, num_rows: int) -> np.ndarray:
    """Returns [B] the weighted sum of the rewards that apply, NaN where none does."""
    if not columns:
        return np.full(num_rows, np.nan)
    stacked = np.stack(columns)
    factors = np.ones(len(columns)) if not weights or len(weights) != len(columns) else np.asarray(weights, np.float64)
    known = ~np.isnan(stacked)
    total = (np.where(known, stacked, 0.0) * factors[:, None]).sum(axis=0)
    return np.where(known.any(axis=0), total, np.nan)


def completion_lengths(file: Any, schema: Any, num_rows: int) -> np.ndarray:
    """Returns [B] the number of sampled tokens of each completion, from a streaming pass over its mask or token ids."""
    column = "mask" if has_mask(schema) else "completion_ids"
    if column not in schema.names:
        return np.zeros(num_rows, np.int64)
    found = [np.zeros(0, np.int64)]
    for batch in file.iter_batches(batch_size=256, columns=[column], use_threads=False):
        lengths = list_lengths(batch.column(0))
        if column == "mask":
            flags = batch.column(0).flatten().fill_null(False).to_numpy(zero_copy_only=False)
            before, ends = np.concatenate([[0], np.cumsum(flags)]), np.cumsum(lengths)
            lengths = before[ends] - before[ends - lengths]
        found.append(lengths.astype(np.int64))
    return np.concatenate(found)


def list_lengths(lists: Any) -> np.ndarray:
    """Returns the length of each list, 0 for null."""
    return np.asarray(lists.value_lengths().fill_null(0))


def has_mask(schema: Any) -> bool:
    """Returns whether a rollout log marks the tokens that the model sampled; a log without it has no others."""
    kind = schema.field("mask").type if "mask" in schema.names else None
    return kind is not None and pyarrow.types.is_list(kind) and pyarrow.types.is_boolean(kind.value_type)


def scalar_text(scalar: Any, limit: int | None) -> tuple[str, int]:
    """Returns the text of a scalar, at most `limit` bytes of it, and the number of bytes of the full text.

    Invalid UTF-8 becomes replacement characters.
    """
    buffer = scalar_buffer(scalar)
    if buffer is None:
        return "", 0
    content = bytes(buffer if limit is None else buffer.slice(0, min(limit, buffer.size)))
    text = content.decode("utf-8", errors="replace")
    return (text.rstrip("\ufffd") if buffer.size > len(content) else text), buffer.size


def scalar_buffer(scalar: Any) -> Any:
    """Returns the bytes of a text or binary scalar without a copy; None for null and for other types."""
    if hasattr(scalar, "dictionary"):
        index = scalar.index.as_py()
        scalar = None if index is None else scalar.dictionary[index]
    return scalar.as_buffer() if hasattr(scalar, "as_buffer") else None


def messages(prompt: str) -> list[dict[str, str]]:
    """Returns the turns of a conversation; none if the prompt is plain text."""
    if not prompt.startswith("[{"):
        return []
    try:
        turns = json.loads(prompt)
    except (ValueError, RecursionError):
        return []
    if not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return []
    return [{"role": str(turn["role"]), "content": _content(turn.get("content"))} for turn in turns]


def shown_prompt(prompt: str) -> str:
    """Returns the text that stands for a prompt in a list: the last turn of a conversation."""
    turns = messages(prompt)
    return turns[-1]["content"] if turns else prompt


def searched_text(prompt: str) -> str:
    """Returns the text that a search looks at: all turns of a conversation."""
    turns = messages(prompt)
    return "\n".join(turn["content"] for turn in turns) if turns else prompt


def prompt_key(scalar: Any) -> str:
    """Returns a hash that identifies a prompt in all steps."""
    return hashlib.blake2b(scalar_buffer(scalar) or b"", digest_size=8).hexdigest()


def _content(content: Any) -> str:
    """Returns the content of a message as text, with "[image]" for an image, which the page shows next to it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else json.dumps(content)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        is_text = kind == "text" and isinstance(part.get("text"), str)
        texts.append(part["text"] if is_text else "[image]" if kind == "image" else json.dumps(part))
    return "".join(texts)


def floats(column: Any) -> np.ndarray:
    """Returns a column as float64; nulls and other values than numbers become NaN."""
    try:
        values = column.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
    except (pyarrow.ArrowException, TypeError):
        return np.full(len(column), np.nan)
    return np.asarray(values, np.float64)
