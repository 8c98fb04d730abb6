"""The run folder: settings, metrics and rollouts on disk. Imports no jax."""

import contextlib
import errno
import json
import os
import secrets
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupax.evaluation.items import Item, write_items
from groupax.events import Emit, Message, TokenScores, ignore
from groupax.metrics.completions import json_numbers
from groupax.runs.rollout_log import RolloutLog, write_table
from groupax.storage.buckets import RemoteFolder, is_remote
from groupax.storage.lock import LOCK, LockedError, RunLock, check_unlocked
from groupax.types import Metrics, Rollout

STEP_FOLDERS = ("rollouts", "evaluations", "bad_steps")  # with files named for steps
TRACKED = "tracked.jsonl"  # of the tracker "jsonl", which goes on in it
MOST_WAITING_TABLES = 64  # that are kept in memory while they cannot be written
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class RunFolder:
    """Writes what a run leaves behind.

    Layout: `config.json`; `run.json`, which run it is and what worked on it; `command.json`, what the command line was
    asked for; `tokenizer/`; `metrics.jsonl`, one line per logged step, written at once; `diagnostics.jsonl`, a line
    with `step`, `name` and `text` for each (see `groupax.runs.diagnostics`); `rollouts/step_N.parquet`, one row per
    completion (see `RolloutLog`); `evaluations/step_N.SET.jsonl`, one line per item; `bad_steps/`, batches whose update
    was not finite; `checkpoints/`; `model/`, written by the trainer at the end.

    What cannot be written because the disk is full or read-only waits in memory until it can (`fault`, `flush`). Files
    that are deleted while the run goes on are written again where their content is known, and a run that loses its
    folder goes on in a new one beside it. The files of a run in a bucket are written to a temporary folder,
    which goes with this object, and uploaded by `sync`.

    Args:
        path: a folder, made if absent, or a URL.
        rollout_log_bytes: budget of `rollouts/`, in a bucket of what this process writes; None for no limit.
        emit: Receives messages about faults of the folder.

    Raises:
        ValueError: the folder cannot be written to.
        LockedError: another run works in the folder.

    Attributes:
        path: the local folder.
        place: the folder or URL, to be told.
        remote: the place in the bucket; None if it is a folder.
        command: contents of `command.json`, if any.
        id: of the run, the same in every process that works on it; set when it begins or goes on.
        fault: why something waits to be written; empty if nothing does.
    """

    def __init__(self, path: str | os.PathLike[str], rollout_log_bytes: int | None = None, emit: Emit = ignore) -> None:
        self.place = str(path if is_remote(path) else Path(path).expanduser())
        self.remote = RemoteFolder(self.place) if is_remote(path) else None
        if self.remote is None and not Path(self.place).name:
            raise ValueError(
                f"output_dir {self.place!r} has no name of its own, by which an earlier run could be moved aside"
            )
        self.path = Path(tempfile.mkdtemp(prefix="groupax-run-")) if self.remote else Path(self.place)
        if self.remote:
            weakref.finalize(self, shutil.rmtree, self.path, True)
        self.moved_aside: str | None = None
        self.command: Mapping[str, Any] | None = None
        self.id = ""
        self.fault, self.emit = "", emit
        self.num_dropped = 0  # tables that waited too long
        self._lock: RunLock | None = None
        self._is_new = False  # the lock has made the folder
        self._texts: dict[str, str] = {}  # of files that are written whole, by name
        self._tokenizer: Any = None
        self._metrics = -1  # a descriptor of metrics.jsonl, by which its lines outlive the file's name
        self._size = 0  # bytes of metrics.jsonl that count
        self._lines: list[str] = []
        self._diagnostics: list[dict[str, Any]] = []
        self._processes: list[Mapping[str, Any]] = []
        self._identities: dict[str, str] = {}  # the digest of what the run is
        self._rollout_log = RolloutLog(self.path / "rollouts", rollout_log_bytes)
        self._tables: deque[Callable[[], object]] = deque()
        self._uploaded: dict[str, tuple[int, int]] = {}
        try:
            if self.remote is not None:
                self.remote.check()
            else:
                check_unlocked(self.path)
                _check_writable(self.path)
        except OSError as error:
            raise ValueError(f"output_dir {self.place} cannot be written to ({error}); choose another") from error

    def lock(self) -> bool:
        """Keep other runs out of the folder until `unlock`; returns whether this call did. A bucket has no locks.

        Raises:
            LockedError: another run works in it.
        """
        if self.remote is not None or self._lock is not None:
            return False
        self._is_new = not self.path.exists()
        try:
            self._lock = RunLock(self.path)
        except OSError as error:
            raise ValueError(f"output_dir {self.place} cannot be written to ({error}); choose another") from error
        return True

    def unlock(self) -> None:
        """Let others have the folder. One in which nothing was written is removed."""
        if self._lock is None:
            return
        self._lock.release()
        self._lock = None
        self._close_metrics()
        if self._is_new and not self._texts:
            with contextlib.suppress(OSError):  # it is not empty
                self.path.rmdir()

    def start(self, config: Mapping[str, Any], identity: str = "", afresh: bool = True) -> None:
        """Begin a run; an earlier one in the folder is moved aside to `path.1`, `path.2`, ...

        It stays where it is if it has nothing to be kept: it made no step, or it is this very run, which was killed
        before its first checkpoint, so that its steps are made again.

        Args:
            config: contents of `config.json`.
            identity: a digest of what the run is.
            afresh: move steps of this very run aside too.
        """
        identities = {"identity": identity} if identity else {}
        if self.remote is not None and self.remote.exists("metrics.jsonl"):
            self.moved_aside = self.remote.move_all_aside()
        elif self.remote is None and has_results(self.path):
            if not afresh and identity and self._is_repeated(identity):
                self._warn(f"the run in {self.place} was stopped before its first checkpoint; its steps are made again")
                self.resume(config, b"", 0)
                return
            self._move_aside()
        self.id, self._diagnostics, self._processes = secrets.token_hex(4), [], []
        self._identities = identities
        self._prepare(config, b"", step=0)

    def resume(self, config: Mapping[str, Any], metrics: bytes, step: int) -> None:
        """Go on with the run in the folder, as it was at a step.

        Args:
            config: contents of `config.json`.
            metrics: contents of `metrics.jsonl` until then.
            step: what was written of later ones is removed.
        """
        about = _parsed(self._earlier("run.json"))
        self.id, self._processes = about.get("id") or secrets.token_hex(4), about.get("processes", [])
        self._identities = {name: about[name] for name in ("identity",) if name in about}
        lines = map(_parsed, self._earlier("diagnostics.jsonl").splitlines())
        self._diagnostics = [dict(line) for line in lines if line.get("step", step + 1) <= step]
        if self.remote and (tracked := self._earlier(TRACKED)):
            (self.path / TRACKED).write_bytes(tracked)
        self._prepare(config, metrics, step)

    def _is_repeated(self, identity: str) -> bool:
        """Whether the run in the folder is this one, and has nothing that would not be made again."""
        is_over = (self.path / "model").exists() or any((self.path / "checkpoints").glob("step_*"))
        return not is_over and _parsed(self._earlier("run.json")).get("identity") == identity

    def _move_aside(self) -> None:
        free = free_name(self.path)
        self.path.rename(free)
        self.moved_aside = str(free)
        if self._lock is None:
            self.path.mkdir()
            return
        old, self._lock = self._lock, RunLock(self.path)
        (free / LOCK).unlink(missing_ok=True)
        old.release()

    def _prepare(self, config: Mapping[str, Any], metrics: bytes, step: int) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in self.path.glob(".model.*"):
            shutil.rmtree(leftover)
        for table in (file for kind in STEP_FOLDERS for file in self.path.glob(f"{kind}/*step_*")):
            number = table.name.rpartition("step_")[2].partition(".")[0]
            if table.name.startswith(".") or (number.isdigit() and int(number) > step):
                table.unlink()
        self._write_text("config.json", json.dumps(config, indent=2) + "\n")
        if self.command is not None:
            self._write_text("command.json", json.dumps(self.command, indent=2) + "\n")
        _write_whole(self.path / "metrics.jsonl", metrics.decode())
        self._size = len(metrics)
        self._open_metrics()
        self._write_diagnostics()
        self._rollout_log.forget()

    def write_process(self, process: Mapping[str, Any]) -> None:
        """Enter what works on the run from now on into `run.json`: devices, versions and so on, as plain data."""
        self._processes = [*self._processes, process]
        about = {"id": self.id, **self._identities, "processes": self._processes}
        self._write_text("run.json", json.dumps(about, indent=2) + "\n")

    def write_tokenizer(self, tokenizer: Any) -> None:
        """Write `tokenizer/`, for whoever exports a checkpoint."""
        self._tokenizer = tokenizer
        tokenizer.save_pretrained(self.path / "tokenizer")

    def metrics(self, num_bytes: int) -> bytes:
        """The first bytes of `metrics.jsonl` as an earlier process left it."""
        return self._earlier("metrics.jsonl")[:num_bytes]

    def _earlier(self, name: str) -> bytes:
        """A file as an earlier process left it; empty if it did not."""
        try:
            return self.remote.read(name) if self.remote else (self.path / name).read_bytes()
        except FileNotFoundError:
            return b""

    def place_of(self, name: str) -> str:
        """The path of a file or folder, or its URL, to be told."""
        return self.remote.url_of(name) if self.remote else str(self.path / name)

    @property
    def num_metrics_bytes(self) -> int:
        """Of `metrics.jsonl`, without lines that wait."""
        return self._size

    def write_metrics(self, metrics: Metrics) -> None:
        """Append one line to `metrics.jsonl`; numbers that are not finite become null."""
        self._lines.append(json.dumps(json_numbers(metrics)) + "\n")
        self.flush()

    def write_diagnostic(self, step: int, name: str, text: str) -> None:
        """Append one line to `diagnostics.jsonl`."""
        self._diagnostics.append({"step": step, "name": name, "text": text})
        self._tables.append(self._write_diagnostics)
        self.flush()

    def write_rollouts(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        scored: Mapping[int, TokenScores] | None = None,
        reward: float = float("nan"),
    ) -> None:
        """Write `rollouts/step_N.parquet`; it appears whole or not at all (see `RolloutLog.write`)."""
        self._tables.append(lambda: self._rollout_log.write(step, rollouts, scored or {}, reward))
        self.flush()

    def write_items(self, name: str, items: Sequence[Item]) -> None:
        """Write `evaluations/NAME.jsonl`, one line per item; it appears whole or not at all."""
        path = self.path / "evaluations" / f"{name}.jsonl"
        self._tables.append(lambda: write_items(path, items))
        self.flush()

    def write_bad_batch(self, step: int, rows: Sequence[Any]) -> Path:
        """Write the rows of an update that was not finite to `bad_steps/step_N.parquet`, one per completion."""
        path = self.path / "bad_steps" / f"step_{step:06d}.parquet"
        self._tables.append(lambda: _write_records(path, [_plain_record(vars(row)) for row in rows]))
        self.flush()
        return path

    def flush(self) -> None:
        """Write what waits; what still cannot be written is told by `fault`."""
        try:
            self._restore()
            if self._lines:
                self._append("".join(self._lines).encode())
                self._lines = []
            while self._tables:
                self._tables[0]()
                self._tables.popleft()
        except OSError as error:
            self._report(str(error))
            while len(self._tables) > MOST_WAITING_TABLES:
                self._tables.popleft()
                self.num_dropped += 1
        else:
            self._report("")

    def _report(self, fault: str) -> None:
        """Emits that the folder can no longer be written to, or that it can again."""
        earlier, self.fault = self.fault, fault
        if fault and not earlier:
            self._warn(
                f"{self.place} cannot be written to: {fault}. Metrics and rollouts wait in memory, and training "
                "continues; make room or repair the folder"
            )
        elif earlier and not fault:
            dropped = f", except {self.num_dropped} tables of rollouts" if self.num_dropped else ""
            self.emit(Message(f"{self.place} can be written to again; everything that waited is there{dropped}"))

    def _warn(self, text: str) -> None:
        self.emit(Message(text, warning=True))

    def give_way(self) -> None:
        """Go on in another folder if nothing can be written in this one, for another reason than that its disk is full.

        Raises:
            OSError: there is no other one either.
        """
        if self.remote is not None:
            return
        try:
            _check_writable(self.path)
        except OSError as error:
            if error.errno not in NO_ROOM:
                self._move_to_another(f"cannot be written to ({error.strerror})")

    def _restore(self) -> None:
        """Write again what was deleted or moved away since the run began.

        Raises:
            OSError: it cannot be written.
        """
        if not self._texts:
            return
        if self._lock is not None and not self._lock.is_in_place:
            self._lock_again()
        missing = [name for name in (*self._texts, "metrics.jsonl") if not (self.path / name).exists()]
        if missing:
            place = self._place_of_metrics()
            moved = f"; what was moved is now in {place}" if place else ""
            self._warn(
                f"files of the run in {self.place} were deleted or moved ({', '.join(missing)}{moved}). They are "
                "written again; checkpoints and rollouts of earlier steps that are gone are not"
            )
            self._write_again(missing)
        if self._tokenizer is not None and not (self.path / "tokenizer").exists():
            self._tokenizer.save_pretrained(self.path / "tokenizer")
        self._size = min(self._size, (self.path / "metrics.jsonl").stat().st_size)

    def _write_again(self, names: Sequence[str]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        for name in names:
            _write_whole(self.path / name, self._kept_metrics() if name == "metrics.jsonl" else self._texts[name])
        self._open_metrics()
        self._rollout_log.forget()

    def _lock_again(self) -> None:
        """The folder is not the one that was locked: lock the one that lies there, or a new one, or go elsewhere."""
        assert self._lock is not None, "the folder was locked"
        try:
            lock = RunLock(self.path)
        except LockedError:
            self._move_to_another("was taken by another run, after this run's files were moved or deleted")
        except (FileExistsError, NotADirectoryError):
            self._move_to_another("is no longer a folder")
        else:
            self._lock.release()
            self._lock = lock

    def _move_to_another(self, why: str) -> None:
        """Go on in a new folder beside the one that cannot be had any more."""
        folder = free_name(self.path)
        lock = RunLock(folder)
        if self._lock is not None:
            self._lock.release()
        self._warn(f"{self.place} {why}; the run goes on in {folder}")
        self._lock, self.path, self.place = lock, folder, str(folder)
        self._rollout_log.folder = folder / "rollouts"
        self._write_again([*self._texts, "metrics.jsonl"])

    def _open_metrics(self) -> None:
        self._close_metrics()
        self._metrics = os.open(self.path / "metrics.jsonl", os.O_RDONLY)

    def _close_metrics(self) -> None:
        if self._metrics >= 0:
            os.close(self._metrics)
        self._metrics = -1

    def _kept_metrics(self) -> str:
        """The lines of `metrics.jsonl`, which can be read as long as it is open, whatever became of its name."""
        return os.pread(self._metrics, self._size, 0).decode() if self._metrics >= 0 else ""

    def _place_of_metrics(self) -> str:
        """Where the `metrics.jsonl` that was written to lies now, if it was moved and the system knows."""
        if self._metrics < 0 or os.fstat(self._metrics).st_nlink == 0:
            return ""
        with contextlib.suppress(OSError):
            return str(Path(f"/proc/self/fd/{self._metrics}").readlink().parent)
        return ""

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
        for name in [
            name for name in self._uploaded if name.startswith("rollouts/") and not (self.path / name).exists()
        ]:
            self.remote.delete(name)
            del self._uploaded[name]

    def _write_diagnostics(self) -> None:
        text = "".join(json.dumps(line) + "\n" for line in self._diagnostics)
        self._write_text("diagnostics.jsonl", text)

    def _write_text(self, name: str, text: str) -> None:
        self._texts[name] = text
        _write_whole(self.path / name, text)

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


def _write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow

    write_table(path, pyarrow.Table.from_pylist(list(records)))


def _check_writable(folder: Path) -> None:
    """See that files can be written in the folder, or in what would have to be made for it. Leaves nothing behind.

    Raises:
        OSError: they cannot.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # another run has begun in it
                path.rmdir()


def has_results(folder: Path) -> bool:
    """Whether the run in a folder made a step, or saved anything: whether it is worth keeping."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        return False
    return metrics.stat().st_size > 0 or (folder / "model").exists() or any((folder / "checkpoints").glob("step_*"))


def _parsed(text: bytes) -> Mapping[str, Any]:
    """A record that an earlier process wrote; empty if it is damaged."""
    try:
        content = json.loads(text or b"{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def _plain_record(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in record.items()}


def free_name(path: Path) -> Path:
    """The first of `path.1`, `path.2`, ... that does not exist."""
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.{number}")
