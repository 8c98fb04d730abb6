"""The rollout log: a Parquet file per logged step, a row per completion, within a budget of bytes. Imports no jax."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from groupax.events import TokenScores
from groupax.types import Prompt, Rollout

KEPT_FRAC = 0.8  # of the budget, when files have to go
ABOUT = b"groupax"  # key of a file's own metadata: {"step", "reward"}


class RolloutLog:
    """The files `step_N.parquet` of a folder.

    Their columns are of simple types: step, prompt_index, sample_index, prompt, completion, finish_reason,
    policy_version, advantage, `rewards/NAME`, `extra/NAME`, and lists: prompt_ids, completion_ids, and of each
    completion token its log-probs, policy_logps and sampler_logps by the engine, trainer_logps by the update's forward
    pass, and the entropies there, in nats (both null where the step did not train on the row).

    Args:
        folder: made when it is needed.
        most_bytes: budget; None for no limit. Files beyond it are removed, such that the steps that are left are evenly
            spread; the first, the newest and the one with the highest reward stay.
    """

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self._sizes: dict[int, int] | None = None  # by step; None until they are looked up
        self._rewards: dict[int, float] = {}

    def path(self, step: int) -> Path:
        """Of a step's file."""
        return self.folder / f"step_{step:06d}.parquet"

    def write(
        self, step: int, rollouts: Sequence[Rollout], scored: Mapping[int, TokenScores], reward: float = float("nan")
    ) -> None:
        """Write a step's file, which appears whole or not at all, and remove others if that is too much.

        Args:
            step: optimizer step.
            rollouts: those that it was about.
            scored: those that it trained on, by index into `rollouts`.
            reward: mean reward of the step.

        Raises:
            OSError: there is no room.
        """
        write_table(self.path(step), rollout_table(step, rollouts, scored, reward))
        if self.most_bytes is None:
            return
        if self._sizes is None:
            self._sizes = {_step_of(path): path.stat().st_size for path in self.folder.glob("step_*.parquet")}
        self._sizes[step], self._rewards[step] = self.path(step).stat().st_size, reward
        if sum(self._sizes.values()) > self.most_bytes:
            self._thin_out(self._sizes, self.most_bytes)

    def forget(self) -> None:
        """Look the files up again: others have changed them."""
        self._sizes, self._rewards = None, {}

    def _thin_out(self, sizes: dict[int, int], most_bytes: int) -> None:
        for step in sizes.keys() - self._rewards.keys():
            self._rewards[step] = _stored_reward(self.path(step))
        known = {step: self._rewards[step] for step in sizes if math.isfinite(self._rewards[step])}
        best = max(known, key=lambda step: known[step]) if known else None
        for step in to_remove(sizes, int(KEPT_FRAC * most_bytes), best):
            self.path(step).unlink(missing_ok=True)
            del sizes[step]


def to_remove(sizes: Mapping[int, int], most_bytes: int, best: int | None) -> list[int]:
    """The steps whose files have to go until the rest fits: always the one whose neighbours are closest, the older one
    of equals.

    Args:
        sizes: bytes by step.
        most_bytes: that may stay.
        best: a step that stays, as the first and the last one do.
    """
    steps, total, removed = sorted(sizes), sum(sizes.values()), []
    while total > most_bytes and len(steps) > 2:
        places = np.asarray(steps)
        gaps = (places[2:] - places[:-2]).astype(float)
        gaps[places[1:-1] == best] = np.inf
        index = int(gaps.argmin())
        if not np.isfinite(gaps[index]):
            break
        step = steps.pop(index + 1)
        removed.append(step)
        total -= sizes[step]
    return removed


def rollout_table(
    step: int, rollouts: Sequence[Rollout], scored: Mapping[int, TokenScores], reward: float = float("nan")
) -> Any:
    """A step's rollouts as a `pyarrow.Table` (see `RolloutLog.write`)."""
    import pyarrow as pa

    def column(kind: Any, value: Callable[[Rollout], Any]) -> Any:
        return pa.array([value(row) for row in rollouts], kind)

    columns = {
        "step": pa.array([step] * len(rollouts), pa.int32()),
        "prompt_index": column(pa.int32(), lambda row: row.prompt_index),
        "sample_index": column(pa.int32(), lambda row: row.sample_index),
        "prompt": column(pa.string(), lambda row: prompt_text(row.prompt)),
        "completion": column(pa.string(), lambda row: valid_text(row.text)),
        "finish_reason": column(pa.string(), lambda row: row.finish_reason),
        "policy_version": column(pa.int32(), lambda row: row.policy_version),
        "advantage": column(pa.float32(), lambda row: row.advantage),
    }
    trained = [scored.get(index) for index in range(len(rollouts))]
    for name in dict.fromkeys(name for row in rollouts for name in row.rewards):
        columns[f"rewards/{name}"] = pa.array([row.rewards.get(name) for row in rollouts], pa.float64())
    for name in dict.fromkeys(name for row in rollouts for name in row.extra):
        columns[f"extra/{valid_text(str(name))}"] = simple_column([row.extra.get(name) for row in rollouts])
    columns |= {
        "prompt_ids": _lists([row.prompt_ids for row in rollouts], np.int32),
        "completion_ids": _lists([row.completion_ids for row in rollouts], np.int32),
        "policy_logps": _lists([row.policy_logps for row in rollouts], np.float32),
        "sampler_logps": _lists([row.sampler_logps for row in rollouts], np.float32),
        "trainer_logps": _lists([each and each.logps for each in trained], np.float32),
        "entropies": _lists([each and each.entropies for each in trained], np.float32),
    }
    about = json.dumps({"step": step, "reward": reward if math.isfinite(reward) else None})
    return pa.table(columns).replace_schema_metadata({ABOUT: about.encode()})


def write_table(path: Path, table: Any) -> None:
    """Write a `pyarrow.Table`, which appears whole or not at all."""
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}")
    try:
        pyarrow.parquet.write_table(table, partial, compression="zstd")
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes records, whose values may be arrays, atomically as a table."""
    import pyarrow

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else value

    rows = [{name: plain(value) for name, value in record.items()} for record in records]
    write_table(path, pyarrow.Table.from_pylist(rows))


def simple_column(values: Sequence[Any]) -> Any:
    """Values of any kind as a `pyarrow.Array` of booleans, whole numbers, numbers, or else of texts."""
    import pyarrow as pa

    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    known = {type(value) for value in plain if value is not None}
    try:
        for kind, column in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64())):
            if known == {kind} or (kind is float and known == {int, float}):
                return pa.array(plain, column)
    except (OverflowError, pa.ArrowInvalid):  # a whole number of more than 64 bits
        pass
    return pa.array([None if value is None else _as_text(value) for value in plain], pa.string())


def prompt_text(prompt: Prompt) -> str:
    """A prompt in one column: a conversation as JSON."""
    return valid_text(prompt) if isinstance(prompt, str) else json.dumps(prompt, default=str)


def valid_text(text: str) -> str:
    """The text with what UTF-8 cannot say, halves of surrogate pairs, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def beginning(text: str, most: int) -> str:
    """The text, or so many characters of it and how many it has."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return valid_text(value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return valid_text(repr(value))


def _lists(values: Sequence[np.ndarray | None], dtype: Any) -> Any:
    """Arrays, [N] each, as a column of lists; None is null."""
    import pyarrow as pa

    flat = [np.asarray(value, dtype) for value in values if value is not None]
    ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)]).astype(np.int32)
    joined = pa.array(np.concatenate(flat) if flat else np.zeros(0, dtype))
    missing = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(ends), joined, mask=missing)


def _stored_reward(path: Path) -> float:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        about = (pyarrow.parquet.read_schema(path).metadata or {}).get(ABOUT)
    except (OSError, pa.ArrowInvalid):  # a damaged file
        return float("nan")
    reward = json.loads(about)["reward"] if about else None
    return float("nan") if reward is None else reward


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])
