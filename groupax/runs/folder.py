"""The run folder: settings, metrics and completions on disk. Imports no jax."""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupax.core.errors import RunError
from groupax.core.storage.buckets import RemoteFolder, is_remote
from groupax.core.storage.folders import MAX_LOG_BYTES, read_file, sync_to_disk
from groupax.core.types import Metrics, Rollout
from groupax.episodes.record import FOLDER as RECORDS
from groupax.evaluation.items import Item, write_items
from groupax.events import TokenScores
from groupax.models.vision.processing import write_processor
from groupax.rollouts.completions import json_numbers
from groupax.runs.ending import Ending, ending_of
from groupax.runs.files import (
    LOCK,
    METRICS,
    RunLock,
    check_unlocked,
    check_writable,
    free_name,
    has_results,
    parsed_record,
    refusing_unwritable,
    replace_text,
    stopping_unwritable,
    upload_changes,
)
from groupax.runs.rollout_log import RolloutLog, write_records

STEP_FOLDERS = ("rollouts", "evaluations", "bad_steps")  # with files named for steps
RECORD, DIAGNOSTICS = "record.jsonl", "diagnostics.jsonl"
MAX_END = 6000  # characters that say why a process ended


class RunFolder:
    """The files of a run.

    Layout: `config.json`; `run.json` with the run's id and its processes; `command.json` with the command line;
    `tokenizer/`; `metrics.jsonl` with one line per logged step, written at once; `diagnostics.jsonl` with `step`,
    `name` and `text` per line; `record.jsonl` with digests of each step (see `StepRecord`); `rollouts/step_N.parquet`
    with one row per completion (see `RolloutLog`);
    `evaluations/step_N.SET.jsonl` with one line per item; `bad_steps/` with batches whose update was not finite;
    `checkpoints/`; `model/`, written by the trainer at the end.

    If a file cannot be written, e.g. because the disk is full, the run stops with an error: it loses nothing, since it
    continues from its newest checkpoint. The files of a run in a bucket are written to a temporary folder, which is
    deleted with this object, and uploaded by `sync`.

    Args:
        path: A folder, created if absent, or a URL; a ValueError says if it is not writable or another run works in it.
        rollout_log_bytes: Budget of `rollouts/`, in a bucket for what this process writes; None for no limit.

    Attributes:
        path: The local folder, which stays where it is if a function changes the working directory.
        uri: The folder or URL, for messages.
        remote: The folder in the bucket; None for a local run.
        command: Content of `command.json`, if any.
        id: Identifier of the run, the same in every process that works on it; set by `start` and `resume`.
        is_incomplete: Whether something could not be written, so that the run must not be saved.
        num_metrics_bytes: Size of `metrics.jsonl`.
        earlier: How the last process on the run in the folder ended, as it was when this one locked it.
        moved_aside: New location of an earlier run that was in this folder, if there was one.
    """

    def __init__(self, path: str | os.PathLike[str], rollout_log_bytes: int | None = None) -> None:
        self.uri = str(path if is_remote(path) else Path(path).expanduser())
        self.remote = RemoteFolder(self.uri) if is_remote(path) else None
        if self.remote is None and not Path(self.uri).name:
            raise ValueError(f"output_dir {self.uri!r} has no name, under which an earlier run could be moved aside")
        self.path = Path(tempfile.mkdtemp(prefix="groupax-run-")) if self.remote else Path(self.uri).absolute()
        if self.remote:
            weakref.finalize(self, shutil.rmtree, self.path, True)
        self.moved_aside: str | None = None
        self.earlier = Ending("", "")
        self.command: Mapping[str, Any] | None = None
        self.id, self.is_incomplete = "", False
        self._identity = ""  # digest of the run's identity, if it is known
        self._lock: RunLock | None = None
        self._is_new = self._is_prepared = False  # created by the lock; has the files of a run
        self._diagnostics: list[dict[str, Any]] = []
        self.num_metrics_bytes = 0
        self._record: list[bytes] = []  # lines of record.jsonl from earlier processes
        self._processes: list[Mapping[str, Any]] = []
        self._is_recorded = False  # whether the last of them is this one
        self._rollout_log = RolloutLog(self.path / "rollouts", rollout_log_bytes)
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and time of each uploaded file
        with refusing_unwritable(self.uri):
            if self.remote is not None:
                self.remote.check()
            else:
                check_unlocked(self.path)
                check_writable(self.path)

    # Starting and resuming.

    def lock(self) -> bool:
        """Locks the folder until `unlock`, and returns whether this call did so. A bucket has no locks.

        Raises a LockedError if another run works in the folder.
        """
        if self.remote is not None or self._lock is not None:
            return False
        self._is_new, self.earlier, self._is_recorded = not self.path.exists(), ending_of(self.path), False
        with refusing_unwritable(self.uri):
            self._lock = RunLock(self.path)
        if self._lock.found and not self.earlier.kind:  # of another machine, or its number is another process's now
            holder = self._lock.found.decode(errors="replace").partition("\n")[0]
            self.earlier = Ending("dead", f"its process ({holder}) has ended without a message")
        return True

    def unlock(self) -> None:
        """Unlocks the folder, as it was if this process was not recorded, and removes it if nothing was written."""
        if self._lock is None:
            return
        self._lock.release(puts_back=not self._is_recorded)
        self._lock = None
        if self._is_new and not self._is_prepared:
            with contextlib.suppress(OSError):  # it is not empty
                self.path.rmdir()

    def start(self, config: Mapping[str, Any], identity: str = "", afresh: bool = True) -> bool:
        """Starts a run; an earlier one in the folder is moved aside to `path.1`, `path.2`, ...

        An earlier run stays if it has no results, or if it has the same identity and was killed before its first
        checkpoint, unless the run starts `afresh`: then its steps are repeated with the recorded answers of its tools.

        Returns:
            Whether steps of an earlier run are repeated in its place.
        """
        is_repeated = not afresh and self.remote is None and self._is_repeated(identity)
        if self.remote is not None and self.remote.exists(METRICS):
            self.moved_aside = self.remote.move_all_aside()
        elif self.remote is None and has_results(self.path):
            if is_repeated:
                self.resume(config, b"", 0)
                return True
            self._move_aside()
        elif not is_repeated:
            shutil.rmtree(self.records, ignore_errors=True)  # of another run, killed before its first step
        self.id, self._identity = secrets.token_hex(4), identity
        self._diagnostics, self._processes, self._record = [], [], []
        self._prepare(config, b"", step=0)
        return False

    def resume(self, config: Mapping[str, Any], metrics: bytes, step: int) -> None:
        """Continues the run in the folder from a step, with `metrics.jsonl` as it was then, without later files."""
        about = parsed_record(self._earlier("run.json"))
        self.id, self._processes = about.get("id") or secrets.token_hex(4), about.get("processes", [])
        if self._processes and self.earlier.text:
            self._processes = [*self._processes[:-1], {**self._processes[-1], "end": self.earlier.text[:MAX_END]}]
        self._identity = about.get("identity", "")
        lines = map(parsed_record, self._earlier(DIAGNOSTICS).splitlines())
        self._diagnostics = [dict(line) for line in lines if line.get("step", step + 1) <= step]
        lines = self._earlier(RECORD).splitlines()
        self._record = [line for line in lines if parsed_record(line).get("step", step + 1) <= step]
        self._prepare(config, metrics, step)

    @property
    def records(self) -> Path:
        """The folder with the answers of tools in unfinished rollouts (see `groupax.episodes.record`)."""
        return self.path / RECORDS

    def metrics(self, num_bytes: int) -> bytes:
        """Returns the first bytes of `metrics.jsonl` as an earlier process left it."""
        return self._earlier(METRICS)[:num_bytes]

    def _earlier(self, name: str) -> bytes:
        """Returns the content of a file from an earlier process; empty if there is none."""
        try:
            return self.remote.read(name) if self.remote else read_file(self.path / name, MAX_LOG_BYTES)
        except FileNotFoundError:
            return b""

    def _is_repeated(self, identity: str) -> bool:
        """Returns whether the run in the folder is this one, and has nothing that will not be repeated."""
        is_over = (self.path / "model").exists() or any((self.path / "checkpoints").glob("step_*"))
        return not is_over and parsed_record(self._earlier("run.json")).get("identity") == identity != ""

    def _move_aside(self) -> None:
        free = free_name(self.path)
        self.path.rename(free)
        self.moved_aside = str(free)
        if self._lock is None:
            self.path.mkdir()
            return
        old, self._lock = self._lock, RunLock(self.path)
        (free / LOCK).write_bytes(old.found) if old.found else (free / LOCK).unlink(missing_ok=True)
        old.release()

    def _prepare(self, config: Mapping[str, Any], metrics: bytes, step: int) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in self.path.glob(".model.*"):
            shutil.rmtree(leftover)
        for table in (file for kind in STEP_FOLDERS for file in self.path.glob(f"{kind}/*step_*")):
            number = table.name.rpartition("step_")[2].partition(".")[0]
            if table.name.startswith(".") or (number.isdigit() and int(number) > step):
                table.unlink()
        self._is_prepared, self._is_recorded = True, False
        self._write_json("config.json", config)
        if self.command is not None:
            self._write_json("command.json", self.command)
        replace_text(self.path / METRICS, metrics.decode())
        self.num_metrics_bytes = len(metrics)
        replace_text(self.path / DIAGNOSTICS, "".join(json.dumps(line) + "\n" for line in self._diagnostics))
        replace_text(self.path / RECORD, "".join(line.decode() + "\n" for line in self._record))

    # Writing.

    def write_process(self, process: Mapping[str, Any]) -> None:
        """Adds a process that works on the run to `run.json`: step, settings, devices and so on, as plain data."""
        command = {} if self.command is None else {"command": self.command}
        lock = {} if self._lock is None else {"lock": self._lock.holder}
        self._processes = [*self._processes, {**process, **command, **lock}]
        self._is_recorded = True
        self._write_processes()

    def write_end(self, why: str, uploads: bool = True) -> None:
        """Adds to the record of this process how it ended; to its lock where the record cannot be written.

        Args:
            uploads: Whether a run in a bucket is uploaded with it.
        """
        if not self._is_recorded:
            return
        self._processes = [*self._processes[:-1], {**self._processes[-1], "end": why[:MAX_END]}]
        kept = ""
        try:
            self._write_processes()
            if uploads:
                self.sync()
        except (OSError, RunError):
            kept = why
        if self._lock is not None and self._lock.is_in_place:
            self._lock.keep(kept)

    def _write_processes(self) -> None:
        self._write_json("run.json", {"id": self.id, "identity": self._identity, "processes": self._processes})

    def write_tokenizer(self, tokenizer: Any, processor_folder: Path | None = None) -> None:
        """Writes `tokenizer/`, which exports of checkpoints need, with the settings of an image processor, if any."""
        tokenizer.save_pretrained(self.path / "tokenizer")
        write_processor(processor_folder, self.path / "tokenizer")

    def uri_of(self, name: str) -> str:
        """Returns the path or URL of a file or folder of the run, for messages."""
        return self.remote.url_of(name) if self.remote else str(self.path / name)

    def write_metrics(self, metrics: Metrics) -> None:
        """Appends one line to `metrics.jsonl`; numbers that are not finite become null."""
        self.num_metrics_bytes += self._append(METRICS, json.dumps(json_numbers(metrics)) + "\n")

    def write_diagnostic(self, step: int, name: str, text: str) -> None:
        """Appends one line to `diagnostics.jsonl`."""
        self._diagnostics.append({"step": step, "name": name, "text": text})
        self._append(DIAGNOSTICS, json.dumps(self._diagnostics[-1]) + "\n")

    def write_record(self, line: str) -> None:
        """Appends one line to `record.jsonl`."""
        self._append(RECORD, line)

    def write_rollouts(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        scores: Mapping[int, TokenScores] | None = None,
        kept: Collection[int] = (),
    ) -> None:
        """Writes `rollouts/step_N.parquet` atomically (see `RolloutLog.write`)."""
        with self._writing():
            self._rollout_log.write(step, rollouts, scores or {}, kept)

    def remove_rollouts(self, step: int) -> None:
        """Removes `rollouts/step_N.parquet`, if there is one."""
        with self._writing():
            self._rollout_log.remove(step)

    def steps_with_findings(self) -> frozenset[int]:
        """Returns the steps in which something was diagnosed, or whose update was skipped."""
        skipped = (path.stem.rpartition("_")[2] for path in (self.path / "bad_steps").glob("step_*.parquet"))
        diagnosed = {int(line["step"]) for line in self._diagnostics}
        return frozenset(diagnosed | {int(number) for number in skipped if number.isdigit()})

    def write_items(self, name: str, items: Sequence[Item]) -> None:
        """Writes `evaluations/NAME.jsonl` atomically, one line per item."""
        with self._writing():
            write_items(self.path / "evaluations" / f"{name}.jsonl", items)

    def write_bad_batch(self, step: int, rows: Sequence[Any]) -> Path:
        """Writes the rows of an update that was not finite to `bad_steps/step_N.parquet`, one per completion."""
        path = self.path / "bad_steps" / f"step_{step:06d}.parquet"
        with self._writing():
            images = [row.images and [image.digest for image in row.images.images] for row in rows]
            write_records(path, [{**vars(row), "images": own} for row, own in zip(rows, images, strict=True)])
        return path

    def settle(self) -> None:
        """Flushes `metrics.jsonl` to the disk."""
        with self._writing():
            sync_to_disk(self.path / METRICS)

    def sync(self) -> None:
        """Uploads new and changed files, if the run is in a bucket; raises an OSError if they cannot be written."""
        if self.remote is not None:
            upload_changes(self.path, self.remote, self._uploaded)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Stops the run if the block cannot write."""
        self.is_incomplete = True
        with stopping_unwritable(self.uri):
            if self._lock is not None and not self._lock.is_in_place:
                raise OSError("it was deleted or moved during the run")
            yield
        self.is_incomplete = False

    def _append(self, name: str, text: str) -> int:
        """Appends a text to a file, and returns its number of bytes."""
        data = text.encode()
        with self._writing(), (self.path / name).open("ab") as file:
            file.write(data)
        return len(data)

    def _write_json(self, name: str, content: Any) -> None:
        with self._writing():
            replace_text(self.path / name, json.dumps(content, indent=2) + "\n")
