"""The facts about a run that are shown before its first step, and the record of the process that works on it."""

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from groupax.core.settings.compute import Checkpointing, CheckpointingChoice
from groupax.data.prompts import PromptSet
from groupax.models.lora import count_params
from groupax.models.weights.checkpoint import Model
from groupax.parallel import processes
from groupax.parallel.accelerators import processor_name
from groupax.parallel.collectives import is_on_host
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import devices_of, versions
from groupax.runs.model_card import shown_name
from groupax.training.learner import Learner

GIT_S = 3.0  # that git may take


def model_facts(model: Model) -> dict[str, str]:
    """Returns facts about the model and its devices by label."""
    trained, total = count_params(model.config, model.adapter and model.adapter.config)
    devices = model.mesh.devices
    return {
        "model": model.name or "a model created in memory",
        "parameters": f"{total:,}, {'all' if trained == total else f'of which {trained:,} are'} trained",
        "devices": f"{devices.size} x {devices.flat[0].device_kind}",
    }


def memory_facts(learner: Learner, num_rows: int, cache_bytes: int = 0) -> dict[str, str]:
    """Returns the memory that a run plans to use on each device, by label.

    Weights and optimizer state are counted. Rollouts and updates, which take further memory one after the other, are
    estimated by arithmetic, without temporary copies of the compiler.
    """
    leaves = jax.tree.leaves((learner.state, learner.policy, learner.reference, learner.frozen))
    arrays = {id(x): x for x in leaves if isinstance(x, jax.Array) and not is_on_host(x)}  # the rest are few numbers
    held = sum(x.addressable_shards[0].data.nbytes for x in arrays.values())
    rollout = f"{_size(cache_bytes)} in a rollout and " if cache_bytes else ""
    rows, tokens = -(-num_rows // learner.num_shards), learner.settings.micro_batch_tokens
    update = learner.memory().update_bytes(learner.state.params, rows, tokens, learner.execution.checkpointing)
    then = f"about {rollout}{_size(update)} in an update"
    return {"planned memory": f"{_size(held)} per device for weights and optimizer, plus {then}"}


def data_name(dataset: Any, num_rows: int) -> str:
    """Returns the source of a dataset: a file, a hub id, or the number of rows that were given in Python."""
    if isinstance(dataset, (str, os.PathLike)):
        return str(dataset)
    if isinstance(dataset, (list, tuple)) and all(isinstance(each, (str, os.PathLike)) for each in dataset):
        return ", ".join(shown_name(str(each)) for each in dataset)
    name = getattr(getattr(dataset, "info", None), "dataset_name", None)
    return f"{name or 'a dataset'}, {num_rows:,} rows from Python"


def prompt_warnings(prompts: PromptSet, held_out: Mapping[str, PromptSet]) -> list[str]:
    """Returns for each dataset how many prompts were too long, if any were."""
    sets = {"train_dataset": prompts} | {f"eval_dataset {name!r}": each for name, each in held_out.items()}
    return [
        f"{name} has prompts longer than {each.max_length} tokens: {each.num_dropped} dropped, {each.num_truncated} "
        f"truncated, {len(each)} left"
        for name, each in sets.items()
        if each.num_dropped + each.num_truncated
    ]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def recomputation(choice: CheckpointingChoice, checkpointing: Checkpointing) -> dict[str, str]:
    """Returns what the backward pass recomputes, unless that is nothing."""
    if checkpointing == "none":
        return {}
    return {"gradient checkpointing": checkpointing + (", chosen for the devices' memory" if choice == "auto" else "")}


def process_of(mesh: Mesh) -> Mapping[str, Any]:
    """Returns the start time, the machine and the libraries of this process, as plain data."""
    return {
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": mesh.devices.flat[0].platform,
        "num_devices": int(mesh.devices.size),
        **devices_of(mesh),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": dict(versions()),
    }


def begun_process(mesh: Mesh, saved: Saved | None) -> Mapping[str, Any]:
    """Returns the record of this process at its start on a run."""
    commit = commit_of(program_folder()) if processes.is_primary() else None
    origin = {"step": 0} if saved is None else {"step": saved.step, "checkpoint": saved.location}
    return {**process_of(mesh), **({"commit": commit} if commit else {}), **origin}


def program_folder() -> Path:
    """Returns the folder of the script that this process runs; of an installed command, the working directory."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path.cwd() if script is None else Path(script).absolute().parent
    installed = Path(sys.prefix).absolute(), Path(__file__).absolute().parents[1]
    return Path.cwd() if any(folder.is_relative_to(each) for each in installed) else folder


def commit_of(folder: Path) -> str | None:
    """Returns the commit that is checked out in a folder, with "-dirty" after it if tracked files differ from it.

    It is None if the folder is in no work tree, or if git is missing, does not trust the folder or takes too long.
    Neither hooks nor monitors of the repository are run.
    """
    command = ["git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=all"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    own |= {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, cwd=folder, env=own, timeout=GIT_S, check=True, capture_output=True, text=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    first, *lines = done.stdout.splitlines()
    commit = first.removeprefix("# branch.oid ")
    is_dirty = any(not line.startswith("#") for line in lines)
    return f"{commit}{'-dirty' * is_dirty}" if commit.isalnum() else None
