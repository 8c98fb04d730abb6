"""The run folder: settings, metrics and rollouts on disk. Imports no jax."""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupax.metrics import Metrics
from groupax.rollout import Rollout


class RunFolder:
    """Writes what a run leaves behind.

    Layout: `config.json`; `metrics.jsonl`, one line per logged step, flushed as it is written;
    `rollouts/step_N.parquet`, one row per completion; `bad_steps/`, batches whose update was not finite; `model/`,
    written by the trainer at the end.

    Args:
        path: made if absent.

    Raises:
        ValueError: the folder cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.moved_aside: Path | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ValueError(f"output_dir {self.path} cannot be written to ({error}); choose another") from error

    def start(self, config: Mapping[str, Any]) -> None:
        """Write `config.json` and an empty `metrics.jsonl`; an earlier run is moved aside to `path.1`, `path.2`, ..."""
        if (self.path / "metrics.jsonl").exists():
            self.moved_aside = _free_name(self.path)
            self.path.rename(self.moved_aside)
            self.path.mkdir()
        (self.path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (self.path / "metrics.jsonl").touch()

    def write_metrics(self, metrics: Metrics) -> None:
        """Append one line to `metrics.jsonl`; numbers that are not finite become null."""
        line = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write `rollouts/step_N.parquet`; it appears whole or not at all."""
        _write_table(self.path / "rollouts" / f"step_{step:06d}.parquet", [_record(step, row) for row in rollouts])

    def write_bad_batch(self, step: int, rows: Sequence[Any]) -> Path:
        """Write the rows of an update that was not finite to `bad_steps/step_N.parquet`, one per completion."""
        return _write_table(
            self.path / "bad_steps" / f"step_{step:06d}.parquet", [_plain_record(vars(row)) for row in rows]
        )


def _write_table(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """The table appears whole or not at all."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), partial)
    partial.rename(path)
    return path


def _plain_record(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in record.items()}


def _record(step: int, row: Rollout) -> dict[str, Any]:
    prompt = row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt)
    return {
        "step": step,
        "prompt_index": row.prompt_index,
        "sample_index": row.sample_index,
        "prompt": prompt,
        "completion": row.text,
        "completion_ids": row.completion_ids.tolist(),
        "policy_logps": row.policy_logps.tolist(),
        "sampler_logps": row.sampler_logps.tolist(),
        "finish_reason": row.finish_reason,
        "policy_version": row.policy_version,
        "advantage": row.advantage,
        **{f"rewards/{name}": value for name, value in row.rewards.items()},
        **{f"extra/{name}": value for name, value in row.extra.items()},
    }


def _free_name(path: Path) -> Path:
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.{number}")
