"""Operations on the files of run folders, and their lock. Imports no jax."""

import contextlib
import datetime
import errno
import itertools
import json
import os
import socket
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from groupax.core.errors import RunError
from groupax.core.storage.buckets import RemoteFolder
from groupax.core.storage.folders import MAX_JSON_BYTES, read_file, replacing_file

METRICS, LOCK = "metrics.jsonl", ".lock"
MAX_LOCK_BYTES = 8192
MAX_KEPT_BYTES = 3800  # with the name of the process less than a block of a file system
LOCK_S = 0.2  # to wait for it, since `groupax view` may just look whether it is held
# Errors of file systems without locks, such as some network ones.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class LockedError(ValueError):
    """Another run uses the folder."""


class RunLock:
    """An exclusive lock on a folder, created if it is absent, which the system releases when the process ends.

    The text of the lock's file names the holder, as does the LockedError for others. A file that a killed process left
    behind stops nobody.

    Attributes:
        holder: The name of this process in the file.
        found: Text that an earlier process left in the file.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOCK
        self._lock = FileLock(self.path, timeout=LOCK_S, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise _refusal(self.path) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            warnings.warn(
                f"{folder} cannot be locked ({error.strerror}): its file system has no locks; nothing stops a second "
                "run from starting in this folder",
                stacklevel=2,
            )
        since = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        self.holder = f"process {os.getpid()} on {socket.gethostname()} since {since}"
        self.path.touch()
        self.found, self._is_kept = read_file(self.path, MAX_LOCK_BYTES), False
        self._write(f"{self.holder}\n".encode())
        self._inode = self.path.stat().st_ino

    @property
    def is_in_place(self) -> bool:
        """True while the lock's file is in the folder, which may have been deleted or moved."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_ino == self._inode
        return False

    def keep(self, text: str) -> None:
        """Adds a text to the file, which then stays; on a full disk too, since it is in the block of the rest.

        An empty text removes an earlier one.
        """
        kept = text.encode()
        if len(kept) > MAX_KEPT_BYTES:  # its first line, and the last frames of a traceback
            kept = kept[: MAX_KEPT_BYTES // 3] + b"\n...\n" + kept[-MAX_KEPT_BYTES // 2 :]
        self._is_kept = bool(kept)
        with contextlib.suppress(OSError):
            self._write(f"{self.holder}\n".encode() + kept)

    def release(self, puts_back: bool = False) -> None:
        """Releases the folder, and removes the file if it is still this lock's and keeps no text.

        Args:
            puts_back: Whether the file gets what an earlier process left in it.
        """
        if self.is_in_place and not self._is_kept:
            with contextlib.suppress(OSError):  # a disk that became read-only
                self._write(self.found) if puts_back and self.found else self.path.unlink()
        self._lock.release()

    def _write(self, content: bytes) -> None:
        """Replaces the content in its place, which needs no room on the disk."""
        with self.path.open("r+b") as file:
            file.write(content)
            file.truncate()


def check_unlocked(folder: Path) -> None:
    """Raises a LockedError if a run uses the folder."""
    if not (folder / LOCK).is_file():  # without the file nobody holds the lock
        return
    try:
        FileLock(folder / LOCK, timeout=LOCK_S, thread_local=False, fallback_to_soft=False).acquire().lock.release()
    except Timeout:
        raise _refusal(folder / LOCK) from None
    except OSError:  # a file system without locks, or one that is read-only
        pass


def _refusal(path: Path) -> LockedError:
    try:
        holder = read_file(path, 4096).decode(errors="replace").strip()
    except OSError:
        holder = ""
    who = f" ({holder})" if holder.startswith("process ") and holder.isprintable() else ""
    return LockedError(
        f"another run uses {path.parent}{who}; wait for it, stop it, or choose another output_dir. Nothing was changed "
        "there"
    )


def has_results(folder: Path) -> bool:
    """Returns whether the run in a folder completed a step or saved anything."""
    metrics = folder / METRICS
    if not metrics.is_file():
        return False
    return metrics.stat().st_size > 0 or (folder / "model").exists() or any((folder / "checkpoints").glob("step_*"))


def complete_run(uri: str, num_steps: int) -> str:
    """Returns a text that the run in a folder is complete, with what to do to train on."""
    return (
        f"the run in {uri} is complete, with {num_steps} steps; to train on, set a larger max_steps (groupax resume "
        f"{uri} --max_steps {2 * num_steps}); for a new run, set resume='never' or another output_dir"
    )


def free_name(path: Path) -> Path:
    """Returns the first of `path.1`, `path.2`, ... that does not exist."""
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(each for each in names if not each.exists())


@contextlib.contextmanager
def refusing_unwritable(output_dir: str) -> Iterator[None]:
    """Turns an OSError of its block into a ValueError that refuses `output_dir`."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"output_dir {output_dir} cannot be written to ({error}); choose another") from error


@contextlib.contextmanager
def stopping_unwritable(uri: str) -> Iterator[None]:
    """Turns an OSError of its block into a RunError, which stops the run in the folder or bucket `uri`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{uri} cannot be written to: {error}. Make room or repair the folder, and start the run again: it "
            "continues from its newest checkpoint"
        ) from error


def check_writable(folder: Path) -> None:
    """Raises an OSError if no file can be written in the folder, or in the one that it would be created in."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    with tempfile.NamedTemporaryFile(dir=existing):
        pass


def parsed_record(text: bytes) -> Mapping[str, Any]:
    """Returns a record of an earlier process; empty if it is damaged."""
    try:
        content = json.loads(text.decode(errors="replace") or "{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_record(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Mapping[str, Any]:
    """Returns the record in a file; empty if there is none, or it is damaged."""
    try:
        return parsed_record(read_file(path, max_bytes))
    except OSError:
        return {}


def replace_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with replacing_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def upload_changes(folder: Path, remote: RemoteFolder, uploaded: dict[str, tuple[int, int]]) -> None:
    """Uploads new and changed files except checkpoints, and deletes removed rollouts.

    `uploaded` has the size and time of each uploaded file by name, and is updated. Raises an OSError if the bucket
    cannot be written to.
    """
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if not file.is_file() or name.startswith(("checkpoints/", "calls/", ".")) or "/." in name:
            continue
        stat = file.stat()
        version = (stat.st_size, stat.st_mtime_ns)
        if uploaded.get(name) != version:
            remote.upload(file, name)
            uploaded[name] = version
    for name in [name for name in uploaded if name.startswith("rollouts/") and not (folder / name).exists()]:
        remote.delete(name)
        del uploaded[name]
