"""The records of the processes that work on a run, which `run.json` has."""

import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from groupax.parallel import processes
from groupax.parallel.accelerators import instruction_set, processor_name
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import devices_of, versions


def process_of(mesh: Mesh) -> Mapping[str, Any]:
    """Returns the start time, the machine and the libraries of this process, as plain data."""
    return {
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": mesh.devices.flat[0].platform,
        "num_devices": int(mesh.devices.size),
        **devices_of(mesh),
        "processor": processor_name(),
        "instruction_set": instruction_set(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": dict(versions()),
    }


def begun_process(mesh: Mesh, saved: Saved | None) -> Mapping[str, Any]:
    """Returns the record of this process at its start on a run."""
    commit = commit_of(program_folder()) if processes.is_primary() else None
    origin = {"step": 0} if saved is None else {"step": saved.step, "checkpoint": saved.location}
    return {**process_of(mesh), **({"commit": commit} if commit else {}), **origin}


TIMEOUT_S = 3.0  # of each of git's commands
_OPTIONS = ("--no-pager", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def program_folder() -> Path:
    """Returns the folder of the script that this process runs; of an installed command, the working directory."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path.cwd() if script is None else Path(script).absolute().parent
    installed = Path(sys.prefix).absolute(), Path(__file__).absolute().parents[1]
    return Path.cwd() if any(folder.is_relative_to(each) for each in installed) else folder


def commit_of(folder: Path) -> str | None:
    """Returns the commit that is checked out in a folder, with "-dirty" after it if tracked files differ from it.

    Returns None if the folder is in no work tree, or if git is missing, does not trust the folder or takes too long.
    Neither hooks nor monitors of the repository are run.
    """
    try:
        commit = _git(folder, "rev-parse", "--verify", "HEAD").strip()
        is_dirty = _git(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all") != ""
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return f"{commit}{'-dirty' if is_dirty else ''}" if _COMMIT.fullmatch(commit) else None


def _git(folder: Path, *arguments: str) -> str:
    """Returns what one of git's commands prints about a folder, whatever the environment says of others."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    own |= {"GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
    return subprocess.run(
        ["git", *_OPTIONS, *arguments],
        cwd=folder,
        env=own,
        timeout=TIMEOUT_S,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout
