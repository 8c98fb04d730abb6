"""The rollout log: one Parquet file per logged step, one row per completion. Imports no jax."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from groupax.core.storage.folders import replacing_file
from groupax.core.types import Prompt, PromptImages, Rollout
from groupax.data.examples import Example, values_as_json, with_values_from_json
from groupax.data.images import image_name, images_of, named, save_png
from groupax.episodes.as_json import (
    branches_as_json,
    branches_from_json,
    messages_as_json,
    messages_from_json,
    turns_as_json,
    turns_from_json,
)
from groupax.events import TokenScores

KEPT_FRAC = 0.8  # of the budget, when files have to go
BY_NAME = ("rewards", "extra")  # fields of a rollout that are mappings
READ: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("prompt_ids", "completion_ids"), partial(np.asarray, dtype=np.int32)),
    **dict.fromkeys(("policy_logps", "sampler_logps"), partial(np.asarray, dtype=np.float32)),
    "mask": partial(np.asarray, dtype=bool),
    "experts": partial(np.asarray, dtype=np.int16),
    "turns": turns_from_json,
    "messages": messages_from_json,
    "branches": branches_from_json,
}


class RolloutLog:
    """The files `step_N.parquet` of a folder, whose columns docs/monitoring.md lists.

    Args:
        folder: Folder to write to, created when needed.
        max_bytes: Budget; None for no limit. Files beyond it are removed so that the remaining steps are evenly spread;
            the first and the newest one are kept.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def path(self, step: int) -> Path:
        """Returns the path of a step's file."""
        return self.folder / f"step_{step:06d}.parquet"

    def write(
        self, step: int, rollouts: Sequence[Rollout], scores: Mapping[int, TokenScores], kept: Collection[int] = ()
    ) -> None:
        """Writes a step's file atomically, and removes others if the budget is exceeded.

        Args:
            step: Optimizer step.
            rollouts: Its completions.
            scores: Token scores of the completions that it trained on, by index into `rollouts`.
            kept: Steps whose files stay if the budget is exceeded.
        """
        if any(row.images is not None for row in rollouts):
            write_images(self.folder.parent, rollouts)
        write_table(self.path(step), rollout_table(step, rollouts, scores))
        if self.max_bytes is None:
            return
        sizes = {path.stem.rpartition("_")[2]: path.stat().st_size for path in self.folder.glob("step_*.parquet")}
        if sum(sizes.values()) > self.max_bytes:
            by_step = {int(number): size for number, size in sizes.items()}
            for each in to_remove(by_step, int(KEPT_FRAC * self.max_bytes), kept):
                self.remove(each)

    def remove(self, step: int) -> None:
        """Removes a step's file, if there is one."""
        self.path(step).unlink(missing_ok=True)


def to_remove(sizes: Mapping[int, int], max_bytes: int, kept: Collection[int] = ()) -> list[int]:
    """Returns the steps whose files to remove: repeatedly the one whose neighbours are closest.

    The first and the last step and those to keep are not among them, even if the others' sizes exceed the budget.
    """
    steps, total, removed = sorted(sizes), sum(sizes.values()), []
    while total > max_bytes:
        gaps = {at: steps[at + 1] - steps[at - 1] for at in range(1, len(steps) - 1) if steps[at] not in kept}
        if not gaps:
            break
        removed.append(steps.pop(min(gaps, key=lambda at: gaps[at])))
        total -= sizes[removed[-1]]
    return removed


def rollout_table(step: int, rollouts: Sequence[Rollout], scores: Mapping[int, TokenScores]) -> Any:
    """Returns a step's completions as a `pyarrow.Table` (see `RolloutLog.write`)."""
    import pyarrow as pa

    prompts = _once_per_prompt(rollouts, lambda row: prompt_text(row.example["prompt"]))
    columns = {
        "step": pa.array([step] * len(rollouts), pa.int32()),
        "prompt_index": pa.array([row.prompt_index for row in rollouts], pa.int32()),
        "sample_index": pa.array([row.sample_index for row in rollouts], pa.int32()),
        "prompt": pa.array(prompts, pa.string()),
        "completion": pa.array([valid_text(row.text) for row in rollouts], pa.string()),
        "finish_reason": pa.array([row.finish_reason for row in rollouts], pa.string()),
        "policy_version": pa.array([row.policy_version for row in rollouts], pa.int32()),
        "advantage": pa.array([row.advantage for row in rollouts], pa.float32()),
    }
    trained = [scores.get(index) for index in range(len(rollouts))]
    for name in dict.fromkeys(name for row in rollouts for name in row.rewards):
        columns[f"rewards/{name}"] = pa.array([row.rewards.get(name) for row in rollouts], pa.float64())
    for name in dict.fromkeys(name for row in rollouts for name in row.extra):
        columns[f"extra/{valid_text(str(name))}"] = simple_column([row.extra.get(name) for row in rollouts])
    for name in ("prompt_ids", "completion_ids", "policy_logps", "sampler_logps"):
        kind = np.int32 if name.endswith("ids") else np.float32
        columns[name] = _lists([getattr(row, name) for row in rollouts], kind)
    columns["trainer_logps"] = _lists([each and each.logps for each in trained], np.float32)
    columns["entropies"] = _lists([each and each.entropies for each in trained], np.float32)
    if any(row.has_turns for row in rollouts):
        columns |= {
            "mask": _lists([row.mask for row in rollouts], bool),
            "turns": pa.array([turns_as_json(row.turns) for row in rollouts], pa.string()),
            "messages": pa.array([messages_as_json(row.messages) for row in rollouts], pa.string()),
        }
    if any(row.environment_reward is not None for row in rollouts):
        columns["environment_reward"] = pa.array([row.environment_reward for row in rollouts], pa.float64())
    if any(row.branches for row in rollouts):
        columns["branches"] = pa.array([branches_as_json(row.branches) for row in rollouts], pa.string())
    row_values = [values_as_json(row.example) for row in rollouts]
    if any(row_values):
        columns["row_values"] = pa.array(row_values, pa.string())
    if any(row.experts is not None for row in rollouts):
        columns["experts"] = _lists(
            [None if row.experts is None else row.experts.ravel() for row in rollouts], np.int16
        )
    if any(row.images is not None for row in rollouts):
        names = _once_per_prompt(rollouts, lambda row: [*map(image_name, images_of(row.example))])
        columns["images"] = pa.array(names, pa.list_(pa.string()))
    return pa.table(columns)


def rollout_of(row: Mapping[str, Any], example: Example, images: PromptImages | None = None) -> Rollout:
    """Returns the completion of a row of a checkpoint, or of this log with its completion as `text`."""
    values = {field.name: row[field.name] for field in fields(Rollout) if row.get(field.name) is not None}
    values |= {name: read(values[name]) for name, read in READ.items() if name in values}
    if "experts" in values:
        values["experts"] = values["experts"].reshape(len(values["completion_ids"]), -1)
    for name in BY_NAME:
        prefix = f"{name}/"
        values[name] = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
    return Rollout(**values | {"example": with_values_from_json(example, row.get("row_values")), "images": images})


def _once_per_prompt(rollouts: Sequence[Rollout], value: Callable[[Rollout], Any]) -> list[Any]:
    """Returns a value of each completion that depends on its dataset's row alone, computed once for each row."""
    known: dict[int, Any] = {}
    for row in rollouts:
        if id(row.example) not in known:
            known[id(row.example)] = value(row)
    return [known[id(row.example)] for row in rollouts]


def write_images(folder: Path, rollouts: Sequence[Rollout]) -> None:
    """Writes the images of prompts that a run folder does not have yet, as images/SHA256.png (see `image_name`)."""
    examples = {id(row.example): row.example for row in rollouts if row.images is not None}
    for image in (image for example in examples.values() for image in images_of(example)):
        if not (path := folder / image_name(image)).exists():
            with replacing_file(path) as partial:
                save_png(image, partial)


def write_table(path: Path, table: Any) -> None:
    """Writes a `pyarrow.Table` atomically."""
    import pyarrow.parquet

    with replacing_file(path) as partial:
        pyarrow.parquet.write_table(table, partial, compression="zstd")


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes records, whose values may be arrays, atomically as a table."""
    import pyarrow

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else value

    rows = [{name: plain(value) for name, value in record.items()} for record in records]
    write_table(path, pyarrow.Table.from_pylist(rows))


def simple_column(values: Sequence[Any]) -> Any:
    """Returns values of any type as a `pyarrow.Array` of booleans, integers, floats, or else of texts."""
    import pyarrow as pa

    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    known = {type(value) for value in plain if value is not None}
    try:
        for kind, column in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64())):
            if known == {kind} or (kind is float and known == {int, float}):
                return pa.array(plain, column)
    except (OverflowError, pa.ArrowInvalid):  # an integer of more than 64 bits
        pass
    return pa.array([None if value is None else _as_text(value) for value in plain], pa.string())


def prompt_text(prompt: Prompt) -> str:
    """Returns a prompt as one text; a conversation as JSON, with the names of its images' files (`image_name`)."""
    return valid_text(prompt) if isinstance(prompt, str) else json.dumps(named(prompt), default=str)


def valid_text(text: str) -> str:
    """Returns the text with unpaired surrogates, which UTF-8 cannot encode, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def beginning(text: str, num_chars: int) -> str:
    """Returns the text, or its first `num_chars` characters and its length."""
    return text if len(text) <= num_chars else f"{text[:num_chars]}… ({len(text):,} characters)"


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return valid_text(value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return valid_text(repr(value))


def _lists(values: Sequence[np.ndarray | None], dtype: Any) -> Any:
    """Returns arrays, [N] each, as a column of lists; None is null."""
    import pyarrow as pa

    converted = [None if value is None else np.asarray(value, dtype) for value in values]
    return pa.array(converted, pa.list_(pa.from_numpy_dtype(dtype)))
