"""`groupax checkpoints`: lists, verifies, deletes and exports the checkpoints of a run."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groupax.settings.command_line import Positional, parsed
from groupax.terminal.printable import printable


@dataclass(frozen=True)
class Checkpoints:
    """List a run's checkpoints, check their files, delete one, or export one as a Hugging Face folder."""

    run_dir: Positional[str]
    """Run folder or URL, or one of its checkpoints."""
    action: Positional[Literal["list", "verify", "delete", "export"]] = "list"
    """The action is to list them with their metrics, verify the checksums of their files, delete one, or export one."""
    step: Positional[int | None] = None
    """Step of the checkpoint to delete or export; the default for export is the newest."""
    to: Path | None = None
    """Folder to export the model to."""


def checkpoints(arguments: Sequence[str]) -> None:
    """Runs `groupax checkpoints`."""
    command = parsed(Checkpoints, "checkpoints", arguments)

    from groupax.runs.checkpoints.choose import split_path, store_of

    run, step = split_path(command.run_dir)
    with tempfile.TemporaryDirectory() as scratch:
        store = store_of(run, Path(scratch))
        steps = store.steps()
        if not steps:
            raise ValueError(f"{run} has no checkpoints")
        chosen = command.step if command.step is not None else step
        if chosen is not None and chosen not in steps:
            raise ValueError(f"{run} has no checkpoint of step {chosen}; it has {', '.join(map(str, steps))}")
        CHECKPOINT_ACTIONS[command.action](store, chosen, command)


def _list_checkpoints(store: Any, _: int | None, command: Checkpoints) -> None:
    from groupax.runs.checkpoints.inspect import listed

    for each in listed(store):
        shown = {
            name: each.metrics[name]
            for name in ("reward", "eval_reward", "loss", "eval_loss", "kl")
            if name in each.metrics
        }
        values = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        where = "within the updates on a rollout" if each.rollout else ""
        line = f"step {each.step:6d}  {each.saved_at or 'state.json cannot be read'}  {values}  {where}"
        print(printable(line.rstrip()))
    print(f"\nto check their files: groupax checkpoints {command.run_dir} verify")


def _verify_checkpoints(store: Any, _: int | None, command: Checkpoints) -> None:
    from groupax.runs.checkpoints.inspect import damages

    found = damages(store)
    for step, fault in found.items():
        print(printable(f"step {step:6d}  {'whole' if fault is None else f'DAMAGED: {fault}'}"))
    num_damaged = sum(fault is not None for fault in found.values())
    if num_damaged:
        raise ValueError(f"{num_damaged} of {len(found)} checkpoints in {command.run_dir} are damaged")


def _delete_checkpoint(store: Any, step: int | None, command: Checkpoints) -> None:
    if step is None:
        raise ValueError(f"which one? groupax checkpoints {command.run_dir} delete STEP")
    store.delete(step)
    print(f"deleted {store.where(step)}")


def _export_checkpoint(store: Any, step: int | None, command: Checkpoints) -> None:
    from groupax.runs.checkpoints.inspect import export

    if command.to is None:
        raise ValueError("where to? give --to FOLDER")
    chosen = store.steps()[-1] if step is None else step
    folder = export(store, chosen, command.to)
    print(f"the model of {store.where(chosen)} is in {folder}")


# The actions of `groupax checkpoints` by name.
CHECKPOINT_ACTIONS = {
    "list": _list_checkpoints,
    "verify": _verify_checkpoints,
    "delete": _delete_checkpoint,
    "export": _export_checkpoint,
}
