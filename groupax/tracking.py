"""The run folder: settings, metrics and rollouts on disk. Imports no jax."""

import json
import math
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupax.evaluation.items import Item, write_items
from groupax.metrics import Metrics
from groupax.remote import Remote, is_remote
from groupax.rollout import Rollout

STEP_FOLDERS = ("rollouts", "evaluations", "bad_steps")  # with files named for steps
MOST_WAITING_TABLES = 64  # that are kept in memory while they cannot be written


class RunFolder:
    """Writes what a run leaves behind.

    Layout: `config.json`; `command.json`, what the command line was asked for; `tokenizer/`; `metrics.jsonl`, one line
    per logged step, written at once; `rollouts/step_N.parquet`, one row per completion; `evaluations/step_N.SET.jsonl`,
    one line per item; `bad_steps/`, batches whose update was not finite; `checkpoints/`; `model/`, written by the
    trainer at the end.

    What cannot be written because the disk is full or read-only waits in memory until it can (`fault`, `flush`). The
    files of a run in a bucket are written to a temporary folder and uploaded by `sync`.

    Args:
        path: a folder, made if absent, or a URL.

    Raises:
        ValueError: the folder cannot be written to.

    Attributes:
        path: the local folder.
        place: the folder or URL, to be told.
        remote: the place in the bucket; None if it is a folder.
        command: contents of `command.json`, if any.
        fault: why something waits to be written; empty if nothing does.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.place = str(path)
        self.remote = Remote(self.place) if is_remote(path) else None
        self.path = Path(tempfile.mkdtemp(prefix="groupax-run-")) if self.remote else Path(path)
        self.moved_aside: str | None = None
        self.command: Mapping[str, Any] | None = None
        self.fault = ""
        self.num_dropped = 0  # tables that waited too long
        self._size = 0  # bytes of metrics.jsonl that count
        self._lines: list[str] = []
        self._tables: deque[Callable[[], object]] = deque()
        self._uploaded: dict[str, tuple[int, int]] = {}
        try:
            if self.remote is not None:
                self.remote.check()
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ValueError(f"output_dir {self.place} cannot be written to ({error}); choose another") from error

    def start(self, config: Mapping[str, Any], metrics: bytes = b"") -> None:
        """Begin a run; an earlier one in the folder is moved aside to `path.1`, `path.2`, ...

        Args:
            config: contents of `config.json`.
            metrics: contents of `metrics.jsonl` so far.
        """
        if self.remote is not None and self.remote.exists("metrics.jsonl"):
            self.moved_aside = self.remote.move_all_aside()
        elif (self.path / "metrics.jsonl").exists():
            free = free_name(self.path)
            self.path.rename(free)
            self.path.mkdir()
            self.moved_aside = str(free)
        self.resume(config, metrics, step=0)

    def resume(self, config: Mapping[str, Any], metrics: bytes, step: int) -> None:
        """Go on with the run in the folder, as it was at a step.

        Args:
            config: contents of `config.json`.
            metrics: contents of `metrics.jsonl` until then.
            step: what was written of later ones is removed.
        """
        for leftover in self.path.glob(".model.*"):
            shutil.rmtree(leftover)
        for table in (file for kind in STEP_FOLDERS for file in self.path.glob(f"{kind}/*step_*")):
            number = table.name.rpartition("step_")[2].partition(".")[0]
            if table.name.startswith(".") or (number.isdigit() and int(number) > step):
                table.unlink()
        _write_whole(self.path / "config.json", json.dumps(config, indent=2) + "\n")
        if self.command is not None:
            _write_whole(self.path / "command.json", json.dumps(self.command, indent=2) + "\n")
        _write_whole(self.path / "metrics.jsonl", metrics.decode())
        self._size = len(metrics)

    def write_tokenizer(self, tokenizer: Any) -> None:
        """Write `tokenizer/`, for whoever exports a checkpoint."""
        tokenizer.save_pretrained(self.path / "tokenizer")

    def metrics(self, num_bytes: int) -> bytes:
        """The first bytes of `metrics.jsonl` as an earlier process left it."""
        try:
            content = self.remote.read("metrics.jsonl") if self.remote else (self.path / "metrics.jsonl").read_bytes()
        except FileNotFoundError:
            content = b""
        return content[:num_bytes]

    @property
    def num_metrics_bytes(self) -> int:
        """Of `metrics.jsonl`, without lines that wait."""
        return self._size

    def write_metrics(self, metrics: Metrics) -> None:
        """Append one line to `metrics.jsonl`; numbers that are not finite become null."""
        line = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._lines.append(json.dumps(line) + "\n")
        self.flush()

    def write_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write `rollouts/step_N.parquet`; it appears whole or not at all."""
        path = self.path / "rollouts" / f"step_{step:06d}.parquet"
        self._tables.append(lambda: _write_table(path, [_record(step, row) for row in rollouts]))
        self.flush()

    def write_items(self, name: str, items: Sequence[Item]) -> None:
        """Write `evaluations/NAME.jsonl`, one line per item; it appears whole or not at all."""
        path = self.path / "evaluations" / f"{name}.jsonl"
        self._tables.append(lambda: write_items(path, items))
        self.flush()

    def write_bad_batch(self, step: int, rows: Sequence[Any]) -> Path:
        """Write the rows of an update that was not finite to `bad_steps/step_N.parquet`, one per completion."""
        path = self.path / "bad_steps" / f"step_{step:06d}.parquet"
        self._tables.append(lambda: _write_table(path, [_plain_record(vars(row)) for row in rows]))
        self.flush()
        return path

    def flush(self) -> None:
        """Write what waits; what still cannot be written is told by `fault`."""
        try:
            if self._lines:
                self._append("".join(self._lines).encode())
                self._lines = []
            while self._tables:
                self._tables[0]()
                self._tables.popleft()
        except OSError as error:
            self.fault = str(error)
            while len(self._tables) > MOST_WAITING_TABLES:
                self._tables.popleft()
                self.num_dropped += 1
        else:
            self.fault = ""

    def settle(self) -> None:
        """Have `metrics.jsonl` on the disk before returning.

        Raises:
            OSError: something cannot be written.
        """
        self.flush()
        if self.fault:
            raise OSError(self.fault)
        with (self.path / "metrics.jsonl").open("rb") as file:
            os.fsync(file.fileno())

    def sync(self) -> None:
        """Upload what is new or has changed, if the run is in a bucket.

        Raises:
            OSError: the bucket cannot be written to.
        """
        if self.remote is None:
            return
        for file in sorted(self.path.rglob("*")):
            name = str(file.relative_to(self.path))
            if not file.is_file() or name.startswith(("checkpoints/", ".")) or "/." in name:
                continue
            stat = file.stat()
            version = (stat.st_size, stat.st_mtime_ns)
            if self._uploaded.get(name) != version:
                self.remote.upload(file, name)
                self._uploaded[name] = version

    def _append(self, data: bytes) -> None:
        """Write behind what counts; a line that did not fit does not count."""
        with (self.path / "metrics.jsonl").open("r+b", buffering=0) as file:
            try:
                file.seek(self._size)
                written = 0
                while written < len(data):
                    written += file.write(data[written:])
            except OSError:
                file.truncate(self._size)
                raise
        self._size += len(data)


def _write_table(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """The table appears whole or not at all."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}")
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), partial)
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return path


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


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


def free_name(path: Path) -> Path:
    """The first of `path.1`, `path.2`, ... that does not exist."""
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.{number}")
