"""Transfers of arrays between this host and the devices of all processes."""

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from groupax.parallel.memory import on_devices
from groupax.parallel.processes import is_primary, num_processes


def to_device(tree: Any, sharding: Any) -> Any:
    """Puts arrays on the devices; arrays that are there already are not copied.

    Args:
        tree: Arrays, equal in all processes.
        sharding: One sharding for all arrays, or a tree with one for each.
    """
    if num_processes() == 1:
        return jax.device_put(tree, sharding)
    shardings = jax.tree.map(lambda _: sharding, tree) if isinstance(sharding, Sharding) else sharding
    return jax.tree.map(_to_device, tree, shardings)


def to_host(tree: Any) -> Any:
    """Gathers arrays in the host memory of every process. All processes must call this."""
    if num_processes() == 1:
        return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    sharded = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and not _is_local(leaf)]
    if sharded:
        gathered = _gather(leaves[sharded[0]].sharding.mesh)(*on_devices([leaves[index] for index in sharded]))
        for index, array in zip(sharded, gathered, strict=True):
            leaves[index] = array
    return jax.device_get(jax.tree.unflatten(structure, leaves))


def to_host_on_primary(tree: Any) -> Any:
    """Copies arrays, one at a time, to the primary process's host; the leaves are None in other processes."""

    def copy(leaf: Any) -> Any:
        array = to_host(leaf)
        return np.array(array) if is_primary() else None

    return jax.tree.map(copy, tree)


def _is_local(array: jax.Array) -> bool:
    return array.is_fully_addressable or array.is_fully_replicated


def _to_device(x: Any, sharding: Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        return jax.jit(lambda x: x, out_shardings=sharding)(x)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


@lru_cache(maxsize=64)
def _gather(mesh: Mesh) -> Any:
    return jax.jit(lambda *arrays: arrays, out_shardings=NamedSharding(mesh, PartitionSpec()))
