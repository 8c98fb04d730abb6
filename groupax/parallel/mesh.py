"""The device mesh, and the one table that maps weights' dims to its axes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from groupax.parallel.runtime import configure_jax

AXES = ("dp", "fsdp", "ep", "tp", "sp")
# Mesh axes along which prompts and completions are sharded.
DATA = ("dp", "fsdp", "ep")
# Mesh axes whose devices compute gradients of different tokens.
TOKENS = (*DATA, "sp")
# Largest weights of which every virtual CPU device holds a copy.
REPLICATED_BYTES = 1 << 28
# The mesh axis that shards each dim of a weight; dims that are not listed are replicated. Weights sharded over fsdp are
# gathered before they are multiplied; those sharded over tp and ep are multiplied shard by shard.
RULES: dict[str, str] = {
    "embed": "fsdp",
    "latent": "fsdp",
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "ffn": "tp",
    "shared_ffn": "tp",
    "expert_ffn": "tp",
    "expert": "ep",
}
# Dims that a device gathers before it multiplies; it has all of what it multiplies along them.
GATHERED = frozenset(name for name, axis in RULES.items() if axis == "fsdp")


@dataclass(frozen=True)
class Layout:
    """The sharding of a model: the mesh axis of each sharded dim, by the names of `RULES`, and of "tokens" (sp).

    Mesh axes with one device are left out.
    """

    axes: tuple[tuple[str, str], ...] = ()

    def axis(self, dim: str | None) -> str | None:
        """Returns the mesh axis that shards this dim; None if it is replicated."""
        return dict(self.axes).get(dim or "")

    def spec(self, dims: tuple[str | None, ...]) -> PartitionSpec:
        """Returns the partition spec of an array with these dims."""
        return PartitionSpec(*map(self.axis, dims))


# One device, or a copy on each.
REPLICATED = Layout()


def make_mesh(
    shape: Sequence[int] = (-1, 1, 1, 1, 1), devices: Sequence[Any] | None = None, dcn: Sequence[int] | None = None
) -> Mesh:
    """Returns a mesh with the axes `dp, fsdp, ep, tp, sp`.

    Args:
        shape: Size of each axis. One may be -1 and takes the remaining devices.
        dcn: Number of slices along each axis, for devices of several slices with a slower network between them. Each
            size must be a multiple of it. None puts all slices along `dp`.

    Raises:
        ValueError: The sizes do not multiply to the number of devices, or are not divisible by the slices.
    """
    configure_jax()
    array = np.array(jax.devices() if devices is None else devices)
    sizes = list(shape)
    if len(sizes) != len(AXES) or sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh must be {len(AXES)} positive sizes for {AXES}, at most one of them -1, got {shape}")
    if -1 in sizes:
        known = -int(np.prod(sizes))
        sizes[sizes.index(-1)] = max(1, array.size // known)
    if np.prod(sizes) != array.size:
        needed = f"{int(np.prod(sizes))} devices" if -1 not in shape else f"a multiple of {known} devices"
        raise ValueError(f"mesh {','.join(map(str, shape))} needs {needed}, but there are {array.size}")
    return Mesh(_arranged(array, sizes, dcn), AXES)


def _arranged(devices: np.ndarray, sizes: list[int], dcn: Sequence[int] | None) -> np.ndarray:
    """Arranges the devices in the mesh so that those that communicate most are neighbours."""
    on_tpu = devices[0].platform == "tpu"
    if not on_tpu and dcn is None:  # elsewhere a slice is a host, and the topology is unknown
        return devices.reshape(sizes)
    from jax.experimental import mesh_utils

    by_slice = slices_along(sizes, len({getattr(device, "slice_index", 0) for device in devices}), dcn)
    within = [size // own for size, own in zip(sizes, by_slice, strict=True)]
    if max(by_slice) == 1:
        return mesh_utils.create_device_mesh(within, devices.tolist(), allow_split_physical_axes=on_tpu)
    return mesh_utils.create_hybrid_device_mesh(within, by_slice, devices.tolist(), allow_split_physical_axes=on_tpu)


def slices_along(sizes: Sequence[int], num_slices: int, dcn: Sequence[int] | None = None) -> list[int]:
    """Returns the number of slices along each axis of a mesh.

    Args:
        dcn: Requested number of slices along each axis; None puts all along the first axis.

    Raises:
        ValueError: A size is not divisible by its slices, or `dcn` does not multiply to `num_slices`.
    """
    by_slice = list(dcn or (num_slices, *(1,) * (len(AXES) - 1)))
    if np.prod(by_slice) != num_slices:
        requested = ",".join(map(str, by_slice))
        raise ValueError(
            f"mesh_dcn {requested} needs {int(np.prod(by_slice))} slices, but the devices belong to {num_slices}"
        )
    for axis, size, own in zip(AXES, sizes, by_slice, strict=True):
        if size % own:
            raise ValueError(
                f"mesh {','.join(map(str, sizes))}: {axis} ({size}) is not divisible by {own} slices; make it a "
                "multiple, or set mesh_dcn to put the slices along another axis"
            )
    return by_slice


def default_mesh(num_bytes: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh of all devices; for large weights on CPU, of one device per process.

    Each virtual CPU device holds a copy of the weights. Small copies stay in the caches, so that every core works on
    its own rows. Large copies all stream through the same memory: a single one, multiplied by all cores, is faster.
    """
    mesh = make_mesh(devices=devices)
    if mesh.devices.flat[0].platform != "cpu" or num_bytes <= REPLICATED_BYTES:
        return mesh
    first = {device.process_index: device for device in reversed(mesh.devices.flatten())}
    array = np.array([first[process] for process in sorted(first)])
    return Mesh(array.reshape(-1, *(1,) * (len(AXES) - 1)), AXES)


def num_data_shards(mesh: Mesh) -> int:
    """Returns the number of shards of the batch."""
    return int(np.prod([mesh.shape[axis] for axis in DATA]))


def decoding_mesh(mesh: Mesh, tp: int = 1) -> Mesh:
    """Returns the mesh for decoding: `tp` neighbouring devices share the weights; the batch is sharded over the rest.

    Raises:
        ValueError: The number of devices is not divisible by `tp`.
    """
    if mesh.shape["tp"] == tp and mesh.shape["dp"] * tp == mesh.devices.size:
        return mesh
    if tp < 1 or mesh.devices.size % tp:
        raise ValueError(
            f"decoding with tp {tp} needs a multiple of {tp} devices, but the mesh has {mesh.devices.size}"
        )
    sizes = {**dict.fromkeys(AXES, 1), AXES[0]: mesh.devices.size // tp, "tp": tp}
    return Mesh(mesh.devices.reshape(tuple(sizes.values())), AXES)


def splits_model(mesh: Mesh) -> bool:
    """Returns whether the mesh shards anything besides the batch."""
    return mesh.shape["dp"] != mesh.devices.size


def layout_for(sizes: Mapping[str, int], mesh: Mesh) -> Layout:
    """Returns the layout of a model; dims that are not divisible are replicated (see `indivisible`)."""
    replicated = {dim for dim, _, _ in indivisible(sizes, mesh)}
    replicated |= {"kv_heads"} if "heads" in replicated else set()
    axes = [(dim, RULES[dim]) for dim in sizes if mesh.shape[RULES[dim]] > 1 and dim not in replicated]
    return Layout((*axes, *([("tokens", "sp")] if mesh.shape["sp"] > 1 else [])))


def indivisible(sizes: Mapping[str, int], mesh: Mesh) -> list[tuple[str, int, str]]:
    """Returns the dims that are not divisible by their mesh axis: name, size and axis."""
    return [(dim, size, RULES[dim]) for dim, size in sizes.items() if size % mesh.shape[RULES[dim]]]


def check_divisible(sizes: Mapping[str, int], mesh: Mesh, replicated: Collection[str] = ()) -> None:
    """Checks that a mesh can shard a model.

    Raises:
        ValueError: A dim is not divisible by its mesh axis; the message names all such dims.
    """
    unknown = sorted(set(replicated) - set(RULES))
    if unknown:
        raise ValueError(f"mesh_replicate names {', '.join(unknown)}; dims that meshes shard are {', '.join(RULES)}")
    found = [each for each in indivisible(sizes, mesh) if each[0] not in replicated]
    if found:
        faults = "; ".join(f"{dim} ({size}) is not divisible by {axis}={mesh.shape[axis]}" for dim, size, axis in found)
        allowed = " ".join(dict.fromkeys((*replicated, *(dim for dim, _, _ in found))))
        raise ValueError(
            f"mesh {format_mesh(mesh)} cannot shard the model: {faults}. Choose other sizes, or replicate these dims: "
            f"mesh_replicate {allowed}"
        )
    if "heads" in sizes and mesh.shape["sp"] > 1:
        shards = mesh.shape["tp"] if sizes["heads"] % mesh.shape["tp"] == 0 else 1
        if sizes["heads"] // shards % mesh.shape["sp"]:
            raise ValueError(
                f"mesh {format_mesh(mesh)}: the {sizes['heads'] // shards} heads of each device are not divisible by "
                f"sp={mesh.shape['sp']}, over which attention shards them; choose a smaller sp"
            )


def format_mesh(mesh: Mesh) -> str:
    """Returns the mesh as settings state it: the sizes of dp, fsdp, ep, tp and sp."""
    return ",".join(str(size) for size in mesh.shape.values())
