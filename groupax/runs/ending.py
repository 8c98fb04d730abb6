"""The ending of a run: as its last process recorded it, or as its lock and files show it. Imports no jax."""

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from groupax.core.storage.folders import open_file, read_file
from groupax.runs.files import LOCK, MAX_LOCK_BYTES, METRICS, parsed_record

MAX_JSON_BYTES = 16 << 20  # of the settings and records of a run


class Ending(NamedTuple):
    """The way in which a run ended, and a text whose first line is a sentence; a traceback may follow.

    The kind is "" for a run that is in progress, or that left no trace of its end.
    """

    kind: Literal["", "done", "stopped", "failed", "dead"]
    text: str

    @property
    def sentence(self) -> str:
        """The first line of the text."""
        return self.text.partition("\n")[0]


def ending_of(folder: Path) -> Ending:
    """Returns how the last process on the run in a folder ended.

    A process records its end in `run.json`, which counts unless another one has locked the folder since. Where that
    cannot be written, e.g. on a full disk, the end is below the name of the process in the lock, which then stays. A
    process that was killed leaves the lock as it was.
    """
    try:
        holder, _, kept = read_file(folder / LOCK, MAX_LOCK_BYTES).decode(errors="replace").partition("\n")
    except OSError:
        holder = kept = ""
    recorded, of_holder = _recorded(folder)
    if text := kept.strip() or (recorded if holder in ("", of_holder) else ""):
        is_done, is_stopped = text.startswith("done"), text.startswith("stopped")
        return Ending("done" if is_done else "stopped" if is_stopped else "failed", text)
    if _is_gone(folder / LOCK, holder):
        text = "its process has ended without a message (killed, for lack of memory for one, or crashed)"
        return Ending("dead", f"{text}; {last_sign(folder) or 'it logged nothing'}")
    return Ending("", "")


def last_sign(folder: Path) -> str:
    """Returns since when a run has logged nothing; empty if it never did."""
    try:
        return f"no sign of life since {datetime.fromtimestamp((folder / METRICS).stat().st_mtime):%d %b %Y, %H:%M}"
    except OSError:
        return ""


def _recorded(folder: Path) -> tuple[str, str]:
    """Returns the end that the last process recorded, and its name in the lock; empty where it recorded none."""
    file = folder / "run.json"
    try:
        about = file.stat()
        return _last_process(file, about.st_mtime_ns, about.st_size)
    except OSError:
        return "", ""


@lru_cache(256)
def _last_process(file: Path, *_: int) -> tuple[str, str]:
    """Reads what `_recorded` returns, once for each time and size of the file, since a page asks every second."""
    processes = parsed_record(read_file(file, MAX_JSON_BYTES)).get("processes")
    last = processes[-1] if isinstance(processes, list) and processes else None
    end, holder = (last.get("end"), last.get("lock")) if isinstance(last, Mapping) else ("", "")
    return end if isinstance(end, str) else "", holder if isinstance(holder, str) else ""


def _is_gone(lock: Path, holder: str) -> bool:
    """Returns whether a lock's text names a process of this machine that is not there, and nobody holds the lock."""
    found = re.match(rf"process ([1-9][0-9]{{,8}}) on {re.escape(socket.gethostname())} since ", holder)
    if found is None:
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:  # it may be in a container that has this machine's name
        with contextlib.suppress(OSError), open_file(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except PermissionError:  # it is another user's
        pass
    return False
