"""One run at a time in a folder: a lock that the system releases when the process ends. Imports no jax.

The lock is `flock` on the file `.lock` in the folder, whose text says who holds it. A file that a killed process left
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

LOCK = ".lock"
# What `flock` fails with on file systems that have no locks, as some network ones.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class LockedError(ValueError):
    """Another run works in the folder."""


class RunLock:
    """Holds a folder for one run. It can be held by one object at a time, also within a process.

    Args:
        folder: made if it is absent.

    Raises:
        LockedError: another run works in the folder; says its process, its host and since when.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._descriptor = _locked(self.path)
        _HELD.add(self)
        if self._descriptor is not None:
            since = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            self.path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n", encoding="utf-8")

    @property
    def is_in_place(self) -> bool:
        """Whether the locked file still lies in the folder of that path: not if it was deleted or moved."""
        if self._descriptor is None:
            return self.path.parent.is_dir()
        return _is_at(self._descriptor, self.path)

    def release(self) -> None:
        """Let others have the folder. The file is removed where it still lies."""
        _HELD.discard(self)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if _is_at(descriptor, self.path):
                self.path.unlink()
        except OSError:  # a disk that became read-only; the lock itself goes with the descriptor
            pass
        finally:
            os.close(descriptor)

    def _forget(self) -> None:
        """In a forked process, which would keep the lock beyond the life of the one that works in the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_HELD: "weakref.WeakSet[RunLock]" = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [lock._forget() for lock in list(_HELD)])


def check_unlocked(folder: Path) -> None:
    """See that no run works in the folder. Nothing is written.

    Raises:
        LockedError: one does.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:  # no such file: nobody has locked it
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _refusal(folder / LOCK) from error
    except OSError:  # a file system without locks
        pass
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """A descriptor of the locked file; None where the file system has no locks."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # open for reading alone, as a file that is open for writing keeps its disk from being made read-only
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                os.close(descriptor)  # NFS locks only what is open for writing
                descriptor = os.open(path, os.O_RDWR)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise _refusal(path) from error
            if error.errno not in WITHOUT_LOCKS:
                raise
            warnings.warn(
                f"{path.parent} cannot be locked ({error.strerror}), as its file system has no locks; nothing stops a "
                "second run from being started in this folder",
                stacklevel=2,
            )
            return None
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # whoever had it has removed or moved the file meanwhile


def _refusal(path: Path) -> LockedError:
    try:
        holder = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        holder = ""
    who = f" ({holder})" if holder.startswith("process ") and holder.isprintable() else ""
    return LockedError(
        f"another run works in {path.parent}{who}; wait for it, stop it, or choose another output_dir. Nothing was "
        "changed there"
    )


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
