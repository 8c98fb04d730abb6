"""Arrays between this host and the devices of all processes."""

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from groupax.parallel.memory import on_devices
from groupax.parallel.processes import is_primary, num_processes


def to_device(tree: Any, sharding: Any) -> Any:
    """Arrays on the devices; those that lie there already are not copied.

    Args:
        tree: of arrays, the same in all processes.
        sharding: of all of them, or a tree of one for each.
    """
    if num_processes() == 1:
        return jax.device_put(tree, sharding)
    shardings = jax.tree.map(lambda _: sharding, tree) if isinstance(sharding, Sharding) else sharding
    return jax.tree.map(_placed, tree, shardings)


def to_host(tree: Any) -> Any:
    """Arrays on the host, whole, in every process. All must call this."""
    if num_processes() == 1:
        return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    split = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and not _is_here(leaf)]
    if split:
        whole = _gather(leaves[split[0]].sharding.mesh)(*on_devices([leaves[index] for index in split]))
        for index, array in zip(split, whole, strict=True):
            leaves[index] = array
    return jax.device_get(jax.tree.unflatten(structure, leaves))


def to_host_on_primary(tree: Any) -> Any:
    """A copy of the arrays on the host of the first process, one after another; None in their places in the others."""

    def of_one(leaf: Any) -> Any:
        array = to_host(leaf)
        return np.array(array) if is_primary() else None

    return jax.tree.map(of_one, tree)


def _is_here(array: jax.Array) -> bool:
    return array.is_fully_addressable or array.is_fully_replicated


def _placed(x: Any, sharding: Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        return jax.jit(lambda x: x, out_shardings=sharding)(x)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


@lru_cache(maxsize=64)
def _gather(mesh: Mesh) -> Any:
    return jax.jit(lambda *arrays: arrays, out_shardings=NamedSharding(mesh, PartitionSpec()))
