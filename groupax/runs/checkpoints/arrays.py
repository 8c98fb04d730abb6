"""Pytrees of arrays on disk, through orbax: written beside training, read onto any mesh.

A tree is stored flat, by the names of its leaves, so that nothing depends on the classes that it is made of.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from groupax.parallel.processes import num_processes


def _quiet(record: logging.LogRecord) -> bool:
    """Orbax logs every error with its traceback before it raises it."""
    return "orbax" not in record.pathname


logging.getLogger("absl").addFilter(_quiet)


def begin_writing(folder: Path, tree: Any) -> Callable[[], None]:
    """Take the values of the arrays as they are now, and write them in the background; by one process alone.

    Args:
        folder: made here.
        tree: of arrays, which may be donated or deleted as soon as this returns.

    Returns:
        A function that waits until all is written, and raises what went wrong.
    """
    import orbax.checkpoint as ocp

    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    options: dict[str, Any] = {"multiprocessing_options": alone} if num_processes() > 1 else {}
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, **options)
    checkpointer = ocp.AsyncCheckpointer(handler, **options)
    checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(_flat(tree)))

    def wait() -> None:
        try:
            checkpointer.wait_until_finished()
        finally:
            checkpointer.close()

    return wait


def read(folder: Path, like: Any) -> Any:
    """The arrays of `folder` in the structure of `like`.

    Args:
        folder: written by `begin_writing`.
        like: of `jax.ShapeDtypeStruct`s with the shardings that the arrays are to have, on whatever mesh.

    Raises:
        ValueError: the folder has other arrays, or arrays of other shapes or dtypes.
    """
    import orbax.checkpoint as ocp

    wanted = _flat(like)
    with ocp.PyTreeCheckpointer() as checkpointer:
        stored = _stored(checkpointer, folder)
        _check(folder, stored, wanted)
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        flat = checkpointer.restore(folder.absolute(), args=ocp.args.PyTreeRestore(wanted, restore_args=restore_args))
    names = list(wanted)
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in names])


def read_on_host(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of a folder by name, on the host."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        names = _stored(checkpointer, folder)
        restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return checkpointer.restore(folder.absolute(), args=ocp.args.PyTreeRestore(restore_args=restore_args))


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree's arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def named_leaves(tree: Any) -> Mapping[str, Any]:
    """A tree's leaves by the names that they are stored under."""
    return _flat(tree)


def _flat(tree: Any) -> dict[str, Any]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    assert len(flat) == len(pairs), "leaves have names of their own"
    return flat


def _stored(checkpointer: Any, folder: Path) -> dict[str, Any]:
    return dict(checkpointer.metadata(folder.absolute()).item_metadata.tree)


def _check(folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    missing, unknown = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"{folder} has other arrays than this run: it lacks {_some(missing)}, and has {_some(unknown)} beside them"
        )
    for name, leaf in wanted.items():
        found = stored[name]
        if tuple(found.shape) != leaf.shape or found.dtype != leaf.dtype:
            raise ValueError(
                f"{folder}: {name} is {found.dtype}{list(found.shape)}, this run has {leaf.dtype}{list(leaf.shape)}"
            )


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "none"
