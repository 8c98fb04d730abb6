"""The records of the processes that work on a run, which `run.json` has."""

import datetime
import os
import platform
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from groupax.parallel import processes
from groupax.parallel.accelerators import instruction_set, processor_name
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import devices_of, versions
from groupax.runs.commit import commit_of, program_folder


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
    """Returns the record of this process at its start on a run.

    Args:
        mesh: The run's devices.
        saved: The checkpoint that it continues; None if it starts from the beginning.
    """
    commit = commit_of(program_folder()) if processes.is_primary() else None
    origin = {"step": 0} if saved is None else {"step": saved.step, "checkpoint": saved.location}
    return {**process_of(mesh), **({"commit": commit} if commit else {}), **origin}
