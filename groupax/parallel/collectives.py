"""Collectives inside a `shard_map`, with the gradient that each one's use calls for.

Along a mesh axis a value is *replicated* when all devices hold the same value, *sharded* when each holds its own slice,
and *partial* when it stands for the sum over the devices. A loss is replicated along the axes that split a model; the
gradient of a replicated value is replicated, and that of a sharded value is sharded.

Each function takes the name of a mesh axis. Without one (None) it returns its input.

| function | forward | backward |
|---|---|---|
| `psum_grad` | identity | psum |
| `psum` | psum | identity |
| `all_gather` | all_gather | reduce_scatter |
| `all_gather_invariant` | all_gather | each device's own slice |
| `reduce_scatter` | reduce_scatter | all_gather |
| `all_to_all` | all_to_all | all_to_all |

Outside of programs: moves of arrays between devices and hosts, and digests of weights.
"""

import hashlib
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Float, Int, Shaped

from groupax.parallel.processes import is_primary, num_processes

Axis = str | None


def axis_index(axis: Axis) -> Int[Array, ""] | int:
    """Returns the device's index along the axis."""
    return 0 if axis is None else lax.axis_index(axis)


def axis_size(axis: Axis) -> int:
    """Returns the number of devices along the axis."""
    return 1 if axis is None else lax.axis_size(axis)


def psum_grad(x: Float[Array, "..."], axis: Axis) -> Float[Array, "..."]:
    """Returns a replicated value that each device uses differently; its gradients are summed (Megatron-LM's f)."""
    return x if axis is None else _psum_grad(x, axis)


def psum(x: Float[Array, "..."], axis: Axis) -> Float[Array, "..."]:
    """Sums a partial value into a replicated one (Megatron-LM's g)."""
    return x if axis is None else _psum(x, axis)


def all_gather(x: Shaped[Array, "..."], axis: Axis, dim: int, reduce_dtype: str = "float32") -> Shaped[Array, "..."]:
    """Gathers a value sharded along `dim`, which each device then uses differently.

    The devices' gradients are summed in `reduce_dtype`, and each device receives those of its slice.
    """
    return x if axis is None else _all_gather(x, axis, dim, reduce_dtype)


def all_gather_invariant(x: Shaped[Array, "..."], axis: Axis, dim: int) -> Shaped[Array, "..."]:
    """Gathers a value sharded along `dim` into a replicated one, whose gradient is the same on all devices."""
    return x if axis is None else _all_gather_invariant(x, axis, dim)


def reduce_scatter(x: Float[Array, "..."], axis: Axis, dim: int) -> Float[Array, "..."]:
    """Sums a partial value into one sharded along `dim`."""
    return x if axis is None else lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(x: Float[Array, "..."], axis: Axis, split_dim: int, concat_dim: int) -> Float[Array, "..."]:
    """Reshards a value from `concat_dim` to `split_dim`."""
    return x if axis is None else lax.all_to_all(x, axis, split_dim, concat_dim, tiled=True)


def local_slice(x: Shaped[Array, "..."], axis: Axis, dim: int) -> Shaped[Array, "..."]:
    """Returns the device's slice along `dim` of a replicated value. Its gradient is partial."""
    if axis is None:
        return x
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum_grad(x: Array, axis: str) -> Array:
    del axis
    return x


_psum_grad.defvjp(lambda x, _axis: (x, None), lambda axis, _, gradient: (lax.psum(gradient, axis),))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum(x: Array, axis: str) -> Array:
    return lax.psum(x, axis)


_psum.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda _axis, _, gradient: (gradient,))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather_invariant(x: Array, axis: str, dim: int) -> Array:
    return lax.all_gather(x, axis, axis=dim, tiled=True)


_all_gather_invariant.defvjp(
    lambda x, axis, dim: (_all_gather_invariant(x, axis, dim), None),
    lambda axis, dim, _, gradient: (local_slice(gradient, axis, dim),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_gather(x: Array, axis: str, dim: int, reduce_dtype: str) -> Array:
    del reduce_dtype
    return lax.all_gather(x, axis, axis=dim, tiled=True)


_all_gather.defvjp(
    lambda x, axis, dim, _: (lax.all_gather(x, axis, axis=dim, tiled=True), None),
    lambda axis, dim, dtype, _, gradient: (reduce_scatter(gradient.astype(dtype), axis, dim).astype(gradient.dtype),),
)


# jax's memory kinds
DEVICE, HOST = "device", "pinned_host"


def on_host(tree: Any) -> Any:
    """Moves arrays to their devices' hosts, sharded as they are; each process moves its own shards."""
    return _moved(tree, HOST)


def on_devices(tree: Any) -> Any:
    """Moves arrays to the devices' own memory; arrays that are there already are not copied."""
    return _moved(tree, DEVICE)


def is_on_host(x: Any) -> bool:
    """Returns whether an array, or the abstract shape of one, is in a host's memory."""
    return x.sharding is not None and x.sharding.memory_kind == HOST


def _moved(tree: Any, kind: str) -> Any:
    def move(x: jax.Array) -> jax.Array:
        if x.sharding.memory_kind == kind:
            return x
        shards = [
            jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
            for shard in x.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding.with_memory_kind(kind), shards)

    return jax.tree.map(move, tree)


def to_device(tree: Any, sharding: Any) -> Any:
    """Puts arrays on the devices; arrays that are there already are not copied.

    Args:
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
    sharded = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    ]
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


SUB_BYTE = ("bool", "int2", "uint2", "int4", "uint4")


def weights_digest(params: Any) -> str:
    """Returns a digest of all weights and their names, independent of their sharding. All processes must call this."""
    named = jax.tree_util.tree_leaves_with_path(params)
    arrays = [jnp.asarray(leaf) for _, leaf in named]
    # if every device has all of an array, one alone reads it
    words = to_host([_words(x.addressable_data(0) if x.is_fully_replicated else x) for x in arrays])
    digest = hashlib.sha256()
    for (path, leaf), pair in zip(named, words, strict=True):
        line = f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)} {[int(word) for word in pair]}".encode()
        digest.update(len(line).to_bytes(8, "little") + line)
    return digest.hexdigest()


@jax.jit
def _words(x: jax.Array) -> jax.Array:
    """Returns two sums modulo 2^32 of a weight's bits, the second mixed with positions; exact in any order."""
    if x.dtype.name in SUB_BYTE:
        x = x.astype(jnp.int32)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, width).astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        position = position * jnp.uint32(x.shape[axis]) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    mixed = (bits ^ (position * jnp.uint32(2654435761))) * jnp.uint32(2246822519)
    mixed = mixed ^ (mixed >> jnp.uint32(15))
    return jnp.stack([jnp.sum(bits, dtype=jnp.uint32), jnp.sum(mixed, dtype=jnp.uint32)])
