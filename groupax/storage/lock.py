"""A lock on a run folder, which the system releases when the process ends. Imports no jax.

The lock is `flock` on the file `.lock` in the folder, whose text names the holder. A file that a killed process left
behind is not locked, so it stops nobody.
"""

import contextlib
import datetime
import errno
import fcntl
import os
import socket
import warnings
import weakref
from pathlib import Path

from groupax.storage.folders import read_file

LOCK = ".lock"
# Errors of `flock` on file systems without locks, such as some network ones.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class LockedError(ValueError):
    """Another run uses the folder."""


class RunLock:
    """An exclusive lock on a folder: one object holds it at a time, also within a process.

    Args:
        folder: Folder to lock, which is created if it is absent.

    Raises:
        LockedError: Another run uses the folder. The message names its process, its host and when it started.
        OSError: The folder is not writable.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._descriptor = _acquire(self.path)
        _HELD.add(self)
        if self._descriptor is not None:
            since = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            self.path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n", encoding="utf-8")

    @property
    def is_in_place(self) -> bool:
        """True while the locked file is at its path, which it is not if the folder was deleted or moved."""
        if self._descriptor is None:
            return self.path.parent.is_dir()
        return _is_at(self._descriptor, self.path)

    def release(self) -> None:
        """Releases the folder, and removes the lock file if it is still at its path."""
        _HELD.discard(self)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if _is_at(descriptor, self.path):
                self.path.unlink()
        except OSError:  # a disk that became read-only; closing the descriptor releases the lock
            pass
        finally:
            os.close(descriptor)

    def _forget(self) -> None:
        """Drops the lock in a forked process, which would otherwise hold it after the owner has ended."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_HELD: "weakref.WeakSet[RunLock]" = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [lock._forget() for lock in list(_HELD)])


def check_unlocked(folder: Path) -> None:
    """Checks that no run uses the folder. Nothing is written.

    Raises:
        LockedError: A run uses it.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK)  # which waits for no writer of a pipe
    except OSError:  # without the file nobody holds the lock
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _refusal(folder / LOCK) from error
    except OSError:  # a file system without locks
        pass
    finally:
        os.close(descriptor)


def _acquire(path: Path) -> int | None:
    """Returns a descriptor of the locked file, or None if the file system has no locks."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # opened read-only, since a file open for writing keeps its disk from being remounted read-only
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                os.close(descriptor)  # NFS only locks files that are open for writing
                descriptor = os.open(path, os.O_RDWR)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise _refusal(path) from error
            if error.errno not in WITHOUT_LOCKS:
                raise
            warnings.warn(
                f"{path.parent} cannot be locked ({error.strerror}): its file system has no locks; nothing stops a "
                "second run from starting in this folder",
                stacklevel=2,
            )
            return None
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # the previous holder has removed or moved the file meanwhile


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


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
