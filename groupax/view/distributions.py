"""Distributions of the completions of each step, as heat maps over steps."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from groupax.view.rollouts import REWARD, completion_lengths, list_lengths, weighted_total
from groupax.view.runs import Run

BUDGET_S = 0.25  # time limit of a call; the page asks again
MAX_STEPS = 120
MAX_VALUES = 2000  # of a step that are kept, evenly spaced
NUM_BINS = 32
OUTERMOST = (0.005, 0.995)  # quantiles at which the bins end
SHOWN_QUANTILES = (0.1, 0.5, 0.9)


class Distributions:
    """The values of a run's completions at up to `MAX_STEPS` steps, read a few steps per call."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._values: dict[int, dict[str, np.ndarray]] = {}
        self._generation = run.generation

    def read(self) -> dict[str, Any]:
        """Reads further steps for a limited time, and returns the heat maps of those read so far.

        Returns:
            steps: [S], steps in order.
            num_steps: Number of steps that will be shown when all are read.
            maps: By name the bin edges `edges` [B + 1], the fraction of the completions per step and bin `shares`
                [S][B], and the quantiles of each step, `quantiles` [S][3].
        """
        chosen = spread_out(self._run.rollout_steps(), MAX_STEPS)
        with self._lock:
            if self._generation != self._run.generation:
                self._values, self._generation = {}, self._run.generation
            started_s = time.monotonic()
            weights = self._run.reward_weights()
            for step in chosen:
                if step in self._values:
                    continue
                if time.monotonic() - started_s > BUDGET_S:
                    break
                try:
                    self._values[step] = step_values(self._run.rollout_file(step), weights)
                except ValueError:  # damaged, or removed in the meantime
                    self._values[step] = {}
            values = {step: self._values[step] for step in sorted(chosen) if step in self._values}
        names = dict.fromkeys(name for each in values.values() for name in each)
        maps = {name: heat_map([each.get(name, np.zeros(0)) for each in values.values()]) for name in names}
        return {"steps": list(values), "num_steps": len(chosen), "maps": {k: v for k, v in maps.items() if v}}


def spread_out(steps: Sequence[int], number: int) -> list[int]:
    """Returns at most `number` of the steps, evenly spread, in an order that covers the whole run early."""
    if len(steps) > number:
        steps = [steps[round(index)] for index in np.linspace(0, len(steps) - 1, number)]
    return [steps[index] for index in _halving(len(steps))]


def _halving(size: int) -> Iterator[int]:
    """Yields 0 to size - 1: the ends first, then the middles between those that came before."""
    seen: set[int] = set()
    parts = 1
    while len(seen) < size:
        for index in np.linspace(0, size - 1, parts + 1).round().astype(int).tolist():
            if index not in seen:
                seen.add(index)
                yield index
        parts *= 2


def step_values(path: Path, weights: Sequence[float] | None) -> dict[str, np.ndarray]:
    """Reads the values of a step's completions by name, without any text.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            rewards = [name for name in schema.names if name.startswith(REWARD)]
            plain = [*rewards, *(["advantage"] if "advantage" in schema.names else [])]
            table = file.read(columns=plain, use_threads=False)
            columns = {name: _floats(table.column(name)) for name in plain}
            found = {"reward": weighted_total([columns[name] for name in rewards], weights, file.metadata.num_rows)}
            found["length"] = completion_lengths(file, schema, file.metadata.num_rows).astype(np.float64)
            if "advantage" in columns:
                found["advantage"] = columns["advantage"]
            if "entropies" in schema.names:
                batches = file.iter_batches(batch_size=1024, columns=["entropies"], use_threads=False)
                found["entropy"] = np.concatenate([row_means(batch.column(0)) for batch in batches] or [np.zeros(0)])
            found |= {f"reward {name.removeprefix(REWARD)}": columns[name] for name in rewards if len(rewards) > 1}
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    return {name: _sampled(values) for name, values in found.items()}


def row_means(lists: Any) -> np.ndarray:
    """Returns the mean of each list, NaN for lists without a value."""
    lengths = list_lengths(lists)
    flat = np.asarray(lists.flatten().to_numpy(zero_copy_only=False), np.float64)
    known = ~np.isnan(flat)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    sums, counts = (np.concatenate([[0.0], np.cumsum(each)]) for each in (np.where(known, flat, 0.0), known))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[ends] - sums[starts]) / (counts[ends] - counts[starts])


def heat_map(steps: Sequence[np.ndarray]) -> Mapping[str, Any] | None:
    """Returns the bin edges, the shares per step and bin, and quantiles per step; None without a value.

    Values beyond the outermost quantiles of all steps count in the first and the last bin.
    """
    values = np.concatenate(steps) if steps else np.zeros(0)
    if not values.size:
        return None
    low, high = (float(each) for each in np.quantile(values, OUTERMOST))
    if low == high:
        low, high = float(values.min()), float(values.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, NUM_BINS + 1)
    shares = [np.histogram(np.clip(each, low, high), edges)[0] / max(len(each), 1) for each in steps]
    quantiles = [np.quantile(each, SHOWN_QUANTILES).tolist() if each.size else [np.nan] * 3 for each in steps]
    return {"edges": edges.tolist(), "shares": [np.round(each, 4).tolist() for each in shares], "quantiles": quantiles}


def _sampled(values: np.ndarray) -> np.ndarray:
    known = values[np.isfinite(values)]
    if len(known) > MAX_VALUES:
        known = known[np.linspace(0, len(known) - 1, MAX_VALUES).astype(int)]
    return known.astype(np.float32).astype(np.float64)


def _floats(column: Any) -> np.ndarray:
    try:
        values = column.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
    except (pyarrow.ArrowException, TypeError):
        return np.full(len(column), np.nan)
    return np.asarray(values, np.float64)
