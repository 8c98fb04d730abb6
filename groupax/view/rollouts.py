"""The rollout logs of steps, read on request."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from groupax.types import TRUNCATIONS
from groupax.view.arrow import as_text, has_mask, scalar_text
from groupax.view.runs import NotFoundError

CACHE_BYTES = 64 * 2**20
NEEDED = ("prompt", "completion", "prompt_index", "sample_index")
PER_TURN = ("turn_advantages", "images")  # lists that are short enough to be read
REWARD = "rewards/"


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

    @property
    def has_images(self) -> bool:
        """Returns whether prompts of the step may have images."""
        return "images" in self.table.column_names

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


def read_step(path: Path, weights: Sequence[float] | None = None) -> Step:
    """Reads a step's rollouts, without the per-token columns.

    Args:
        path: Path of the rollout log.
        weights: Weights of the reward functions in the order of their columns; 1 each if None or of another length.

    Raises:
        ValueError: The file is damaged or is not a rollout log.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            missing = [name for name in NEEDED if name not in schema.names]
            if missing:
                raise ValueError(f"{path.name} is not a rollout log: it has no column {', '.join(missing)}")
            flat = [item.name for item in schema if not pyarrow.types.is_nested(item.type) or item.name in PER_TURN]
            table = file.read(columns=flat, use_threads=False)
            lengths = completion_lengths(file, schema, table.num_rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    names = [name for name in flat if name.startswith(REWARD)]
    rewards = {name.removeprefix(REWARD): _floats(table, name) for name in names}
    reasons = table.column("finish_reason").to_pylist() if "finish_reason" in flat else []
    return Step(
        table=table,
        prompt_index=table.column("prompt_index").to_numpy().astype(np.int64),
        rewards=rewards,
        total=weighted_total(list(rewards.values()), weights, table.num_rows),
        advantage=_floats(table, "advantage"),
        truncated=np.array([reason in TRUNCATIONS for reason in reasons] or [False] * table.num_rows, bool),
        num_tokens=lengths,
    )


def read_texts(path: Path) -> tuple[list[str], Any]:
    """Returns a step's different prompts, and an array of its completions: all that most searches need.

    Args:
        path: Path of the rollout log.

    Raises:
        ValueError: The file is damaged or is not a rollout log.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            table = file.read(columns=["prompt", "completion"], use_threads=False)
        prompts, completions = as_text(table.column("prompt")).unique(), as_text(table.column("completion"))
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    return [scalar_text(prompt, None)[0] for prompt in prompts], completions


class StepCache:
    """A cache of the most recently requested steps, up to a number of bytes."""

    def __init__(self, num_bytes: int = CACHE_BYTES) -> None:
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self._steps: OrderedDict[tuple[Path, int, tuple[float, ...]], Step] = OrderedDict()
        self._num_cached = 0  # bytes

    def read(self, path: Path, weights: Sequence[float] | None) -> Step:
        """Returns `read_step`, cached until the file or the weights change."""
        key = (path, path.stat().st_mtime_ns, tuple(weights or ()))
        with self._lock:
            if key in self._steps:
                self._steps.move_to_end(key)
                return self._steps[key]
        step = read_step(path, weights)
        with self._lock:
            if key not in self._steps:  # which another thread may have read meanwhile
                self._steps[key] = step
                self._num_cached += step.table.nbytes
            while len(self._steps) > 1 and self._num_cached > self._num_bytes:
                self._num_cached -= self._steps.popitem(last=False)[1].table.nbytes
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
    count = _num_true if column == "mask" else _lengths
    batches = file.iter_batches(batch_size=256, columns=[column], use_threads=False)
    lengths = [count(batch.column(0)) for batch in batches]
    return np.concatenate(lengths).astype(np.int64) if lengths else np.zeros(0, np.int64)


def _lengths(lists: Any) -> np.ndarray:
    return np.asarray(lists.value_lengths().fill_null(0))


def _num_true(lists: Any) -> np.ndarray:
    flags = lists.flatten().fill_null(False).to_numpy(zero_copy_only=False)
    before = np.concatenate([[0], np.cumsum(flags)])
    ends = np.cumsum(_lengths(lists))
    return before[ends] - before[ends - _lengths(lists)]


def _floats(table: Any, name: str) -> np.ndarray:
    """Returns a column as float64; nulls and other values than numbers become NaN."""
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan)
    values = table.column(name).to_pylist()
    return np.array([float(value) if isinstance(value, int | float) else np.nan for value in values], np.float64)
