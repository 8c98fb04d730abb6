"""The device mesh and the one table that maps a weight's logical axes to it."""

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from groupax.parallel.runtime import configure_jax

AXES = ("dp", "fsdp", "ep", "tp", "sp")
# Mesh axes over which prompts and completions are spread.
DATA = ("dp", "fsdp")
# Largest weights that every virtual CPU device has a copy of.
REPLICATED_BYTES = 1 << 28
# Which mesh axis splits a dim of a weight; dims that are not named are replicated.
RULES: dict[str, str] = {
    "embed": "fsdp",
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "ffn": "tp",
    "expert": "ep",
}


def make_mesh(shape: tuple[int, int, int, int, int] = (-1, 1, 1, 1, 1)) -> Mesh:
    """A mesh over all devices with the axes `dp, fsdp, ep, tp, sp`; one size may be -1 and takes what is left.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    configure_jax()
    devices = np.array(jax.devices())
    sizes = list(shape)
    if len(sizes) != len(AXES) or sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh must be {len(AXES)} positive sizes for {AXES}, at most one of them -1, got {shape}")
    if -1 in sizes:
        known = -int(np.prod(sizes))
        sizes[sizes.index(-1)] = max(1, devices.size // known)
    if np.prod(sizes) != devices.size:
        raise ValueError(f"mesh {tuple(shape)} asks for {int(np.prod(sizes))} devices, there are {devices.size}")
    return Mesh(devices.reshape(sizes), AXES)


def mesh_for(num_bytes: int) -> Mesh:
    """The mesh for weights of this size: all devices, but on CPU one of them if the weights are large.

    Virtual CPU devices have a copy of the weights each. Small copies stay in the caches, and every core has its own
    rows; large ones all stream through the same memory, so that one copy, whose products use all cores, is faster.
    """
    mesh = make_mesh()
    if mesh.devices.flat[0].platform != "cpu" or num_bytes <= REPLICATED_BYTES:
        return mesh
    return Mesh(mesh.devices.reshape(-1)[:1].reshape((1,) * len(AXES)), AXES)


def num_data_shards(mesh: Mesh) -> int:
    """Over how many devices rows are spread."""
    return int(np.prod([mesh.shape[axis] for axis in DATA]))


def sharding_for(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Where a weight with these logical axes lies on the mesh.

    Raises:
        ValueError: a dim does not divide by the mesh axis that splits it.
    """
    names = [RULES.get(axis) if axis else None for axis in axes]
    for name, size, axis in zip(names, shape, axes, strict=True):
        if name and size % mesh.shape[name]:
            raise ValueError(f"dim {axis!r} of size {size} does not divide by mesh axis {name}={mesh.shape[name]}")
    return PartitionSpec(*(name if name and mesh.shape[name] > 1 else None for name in names))
