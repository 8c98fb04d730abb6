"""A recorded run: what its folder has of each step. It is only read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from groupax.episodes.as_json import branches_from_json, messages_from_json, turns_from_json
from groupax.runs.checkpoints.choose import Saved, readable_checkpoints
from groupax.runs.checkpoints.store import LocalStore
from groupax.runs.rollout_log import RolloutLog
from groupax.runs.step_record import NAME, StepRecord, parsed_records
from groupax.storage.buckets import is_remote
from groupax.types import Rollout

FROM_JSON = {"turns": turns_from_json, "messages": messages_from_json, "branches": branches_from_json}
ARRAYS = {
    "prompt_ids": np.int32,
    "completion_ids": np.int32,
    "policy_logps": np.float32,
    "sampler_logps": np.float32,
    "mask": np.bool_,
}


@dataclass(frozen=True)
class RecordedRun:
    """A run folder that is replayed.

    Attributes:
        folder: The run folder.
    """

    folder: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The settings of the run."""
        return json.loads((self.folder / "config.json").read_bytes())

    @cached_property
    def records(self) -> dict[int, StepRecord]:
        """The digests of each step."""
        path = self.folder / NAME
        return parsed_records(path.read_bytes()) if path.is_file() else {}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`."""
        lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
        return [json.loads(line) for line in lines]

    def checkpoint(self, step: int) -> Saved | None:
        """Returns the newest intact checkpoint at this step or before it; None if there is none."""
        found: list[Saved] = []
        for name in ("checkpoints", "states"):
            each = (saved for saved in readable_checkpoints(LocalStore(self.folder / name), {}) if saved.step <= step)
            found += [saved for saved in (next(each, None),) if saved is not None]
        return max(found, key=lambda saved: saved.step, default=None)

    def calls(self, number: int) -> list[Path]:
        """Returns the files with what tools and environments answered in a rollout."""
        return sorted((self.folder / "calls").glob(f"rollout_{number:06d}.*.jsonl"))

    def keeps(self, steps: Sequence[int]) -> bool:
        """Returns whether the completions of one of these steps were kept."""
        return any(RolloutLog(self.folder / "rollouts").path(step).is_file() for step in steps)

    def table(self, step: int) -> dict[str, list[Any]] | None:
        """Returns the columns of the step's completions; None if they were not kept."""
        path = RolloutLog(self.folder / "rollouts").path(step)
        if not path.is_file():
            return None
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pydict()

    def groups(self, steps: Sequence[int], examples: Any) -> list[list[Rollout]] | None:
        """Returns the scored completions of a rollout by group; None if they were not kept.

        Args:
            steps: The steps that trained on the rollout, each of whose files has all of it.
            examples: Function that returns the dataset's rows of this many prompts.
        """
        columns = next((table for step in steps if (table := self.table(step)) is not None), None)
        if columns is None:
            return None
        rows = examples(len(set(columns["prompt_index"])))
        groups: dict[int, list[Rollout]] = {}
        for index, prompt in enumerate(columns["prompt_index"]):
            groups.setdefault(prompt, []).append(_rollout(columns, index, rows[prompt]))
        return [*groups.values()]


def recorded_run(path: str | Path) -> RecordedRun:
    """Returns the recorded run in a folder.

    Raises:
        ValueError: There is none, or it has no record.
    """
    if is_remote(str(path)):
        raise ValueError(f"{path} is in a bucket; copy the run to a local folder to replay it")
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no run folder: it has no config.json")
    run = RecordedRun(folder)
    if not run.records:
        raise ValueError(f"{folder} has no step in {NAME}: no optimizer step of GRPO was recorded there")
    return run


def _rollout(columns: Mapping[str, list[Any]], index: int, example: Mapping[str, Any]) -> Rollout:
    values: dict[str, Any] = {}
    for name in ("prompt_index", "sample_index", "finish_reason", "policy_version", "advantage"):
        values[name] = columns[name][index]
    for name, dtype in ARRAYS.items():
        if name in columns:
            values[name] = np.asarray(columns[name][index], dtype)
    for name, read in FROM_JSON.items():
        if name in columns:
            values[name] = read(columns[name][index])
    if columns.get("turn_advantages") and columns["turn_advantages"][index] is not None:
        values["turn_advantages"] = tuple(columns["turn_advantages"][index])
    for name in ("environment_reward", "adapter"):
        if name in columns:
            values[name] = columns[name][index]
    for field in ("rewards", "extra"):
        prefix = f"{field}/"
        values[field] = {
            name.removeprefix(prefix): column[index] for name, column in columns.items() if name.startswith(prefix)
        }
    return Rollout(example=example, text=columns["completion"][index], **values)
