"""Pytrees of arrays on disk, by orbax: written in the background, read onto any mesh.

A tree is stored flat, by the names of its leaves, so that nothing depends on the classes of its nodes.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from groupax.parallel.processes import num_processes

# Of arrays that all devices have, each device copies a part to the host; every shape of a part takes a compilation.
LEAST_PART_BYTES = 8 * 2**20
_SAVING = threading.Lock()  # orbax numbers saves without regard to threads, and may take one for another


# Orbax logs every error with its traceback before it raises it.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


def start_writing(folder: Path, trees: Mapping[str, Any]) -> Callable[[], None]:
    """Copies trees of arrays to the host and writes each into the subfolder of its name in the background.

    The arrays may be donated or deleted as soon as this returns. One process alone calls it.

    Returns:
        A function that waits until everything is written, and raises what went wrong.
    """
    import orbax.checkpoint as ocp

    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    options: dict[str, Any] = {"multiprocessing_options": alone} if num_processes() > 1 else {}
    checkpointers = []
    for name, tree in trees.items():
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=_handlers(), **options)
        checkpointers.append(ocp.AsyncCheckpointer(handler, **options))
        with _SAVING:
            checkpointers[-1].save((folder / name).absolute(), args=ocp.args.PyTreeSave(named_leaves(tree)))

    def wait() -> None:
        for each in checkpointers:
            with closing(each):
                each.wait_until_finished()

    return wait


def _handlers() -> Any:
    from orbax.checkpoint import type_handlers

    arrays = type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=LEAST_PART_BYTES)
    return type_handlers.create_type_handler_registry((jax.Array, arrays), (np.ndarray, type_handlers.NumpyHandler()))


def read(folder: Path, like: Any) -> Any:
    """Returns the arrays of a folder in the structure of `like`, of `jax.ShapeDtypeStruct`s with any shardings.

    Raises a ValueError if the folder has other arrays, or arrays of other shapes or dtypes.
    """
    import orbax.checkpoint as ocp

    requested = named_leaves(like)
    with ocp.PyTreeCheckpointer() as checkpointer:
        stored = _stored(checkpointer, folder)
        _check(folder, stored, requested)
        restore_args = ocp.checkpoint_utils.construct_restore_args(requested)
        args = ocp.args.PyTreeRestore(requested, restore_args=restore_args)
        flat = checkpointer.restore(folder.absolute(), args=args)
    names = list(requested)
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in names])


def read_on_host(folder: Path) -> dict[str, np.ndarray]:
    """Returns all arrays of a folder by name, on the host."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        names = _stored(checkpointer, folder)
        restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return checkpointer.restore(folder.absolute(), args=ocp.args.PyTreeRestore(restore_args=restore_args))


def abstract(tree: Any) -> Any:
    """Returns the shapes, dtypes and shardings of a tree's arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns a tree's leaves by the names under which they are stored."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    assert len(flat) == len(pairs), "leaves have names of their own"
    return flat


def _stored(checkpointer: Any, folder: Path) -> dict[str, Any]:
    return dict(checkpointer.metadata(folder.absolute()).item_metadata.tree)


def _check(folder: Path, stored: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    missing, unknown = sorted(requested.keys() - stored.keys()), sorted(stored.keys() - requested.keys())
    if missing or unknown:
        raise ValueError(f"{folder} has other arrays than this run: {_some(missing)} missing, {_some(unknown)} unknown")
    for name, leaf in requested.items():
        found = stored[name]
        if tuple(found.shape) != leaf.shape or found.dtype != leaf.dtype:
            raise ValueError(
                f"{folder}: {name} is {found.dtype}{list(found.shape)}, this run has {leaf.dtype}{list(leaf.shape)}"
            )


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "none"
