"""The device mesh and the one table that maps a weight's logical axes to it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from groupax.parallel.runtime import configure_jax

AXES = ("dp", "fsdp", "ep", "tp", "sp")
# Mesh axes over which prompts and completions are spread.
DATA = ("dp", "fsdp", "ep")
# Mesh axes whose devices compute gradients of tokens of their own.
TOKENS = (*DATA, "sp")
# Largest weights that every virtual CPU device has a copy of.
REPLICATED_BYTES = 1 << 28
# Which mesh axis splits a dim of a weight; dims that are not named are replicated. Weights that are split over fsdp are
# gathered to be multiplied; those over tp and ep are multiplied in parts.
RULES: dict[str, str] = {
    "embed": "fsdp",
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "ffn": "tp",
    "expert_ffn": "tp",
    "expert": "ep",
}


@dataclass(frozen=True)
class Layout:
    """How a model is split: the mesh axis of each dim that is, by the names of `RULES`; "tokens" are split over sp.

    A mesh axis of one device splits nothing.
    """

    axes: tuple[tuple[str, str], ...] = ()

    def axis(self, dim: str | None) -> str | None:
        """The mesh axis that splits this dim; None if it is whole."""
        return dict(self.axes).get(dim or "")

    def spec(self, dims: tuple[str | None, ...]) -> PartitionSpec:
        """Where an array with these dims lies."""
        return PartitionSpec(*map(self.axis, dims))


# On one device, or a copy on each.
WHOLE = Layout()


def make_mesh(
    shape: Sequence[int] = (-1, 1, 1, 1, 1), of: Sequence[Any] | None = None, dcn: Sequence[int] | None = None
) -> Mesh:
    """A mesh with the axes `dp, fsdp, ep, tp, sp`; one size may be -1 and takes what is left.

    Args:
        shape: the sizes.
        of: devices; None for all that there are.
        dcn: how many slices lie along each axis, where devices are of several, between which the network is slower;
            the sizes are multiples of these. None has all slices along `dp`.

    Raises:
        ValueError: the sizes do not multiply to the number of devices, or do not divide by the slices.
    """
    configure_jax()
    devices = np.array(jax.devices() if of is None else of)
    sizes = list(shape)
    if len(sizes) != len(AXES) or sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh must be {len(AXES)} positive sizes for {AXES}, at most one of them -1, got {shape}")
    if -1 in sizes:
        known = -int(np.prod(sizes))
        sizes[sizes.index(-1)] = max(1, devices.size // known)
    if np.prod(sizes) != devices.size:
        asked = f"{int(np.prod(sizes))} devices" if -1 not in shape else f"a multiple of {known}"
        raise ValueError(f"mesh {','.join(map(str, shape))} asks for {asked}, there are {devices.size} devices")
    return Mesh(_arranged(devices, sizes, dcn), AXES)


def _arranged(devices: np.ndarray, sizes: list[int], dcn: Sequence[int] | None) -> np.ndarray:
    """The devices in the shape of a mesh, those that talk most to each other next to each other."""
    on_tpu = devices[0].platform == "tpu"
    if not on_tpu and dcn is None:  # what else calls a slice is a host, and nothing is known of what is next to what
        return devices.reshape(sizes)
    from jax.experimental import mesh_utils

    by_slice = slices_along(sizes, len({getattr(device, "slice_index", 0) for device in devices}), dcn)
    within = [size // own for size, own in zip(sizes, by_slice, strict=True)]
    if max(by_slice) == 1:
        return mesh_utils.create_device_mesh(within, devices.tolist(), allow_split_physical_axes=on_tpu)
    return mesh_utils.create_hybrid_device_mesh(within, by_slice, devices.tolist(), allow_split_physical_axes=on_tpu)


def slices_along(sizes: Sequence[int], num_slices: int, dcn: Sequence[int] | None = None) -> list[int]:
    """How many slices lie along each axis of a mesh of these sizes.

    Args:
        sizes: of the mesh.
        num_slices: that there are.
        dcn: as it is asked for; None has all along the first axis.

    Raises:
        ValueError: the sizes do not divide by them, or they are not as many as there are.
    """
    by_slice = list(dcn or (num_slices, *(1,) * (len(AXES) - 1)))
    if np.prod(by_slice) != num_slices:
        asked = ",".join(map(str, by_slice))
        raise ValueError(f"mesh_dcn {asked} asks for {int(np.prod(by_slice))} slices, the devices are of {num_slices}")
    for axis, size, own in zip(AXES, sizes, by_slice, strict=True):
        if size % own:
            raise ValueError(
                f"mesh {','.join(map(str, sizes))}: {axis} ({size}) does not divide by {own} slices; make it a "
                "multiple, or set mesh_dcn to have the slices along another axis"
            )
    return by_slice


def mesh_for(num_bytes: int, of: Sequence[Any] | None = None) -> Mesh:
    """The mesh for weights of this size: all devices, but on CPU one of each process if the weights are large.

    Args:
        num_bytes: of the weights.
        of: devices; None for all that there are.

    Virtual CPU devices have a copy of the weights each. Small copies stay in the caches, and every core has its own
    rows; large ones all stream through the same memory, so that one copy, whose products use all cores, is faster.
    """
    mesh = make_mesh(of=of)
    if mesh.devices.flat[0].platform != "cpu" or num_bytes <= REPLICATED_BYTES:
        return mesh
    of_process = {device.process_index: device for device in reversed(mesh.devices.flatten())}
    devices = np.array([of_process[process] for process in sorted(of_process)])
    return Mesh(devices.reshape(-1, *(1,) * (len(AXES) - 1)), AXES)


def num_data_shards(mesh: Mesh) -> int:
    """Over how many devices rows are spread."""
    return int(np.prod([mesh.shape[axis] for axis in DATA]))


def decoding_mesh(mesh: Mesh, tp: int = 1) -> Mesh:
    """The same devices as rollouts are decoded on: so many neighbours share the weights, all else are data shards.

    Raises:
        ValueError: the devices do not divide by `tp`.
    """
    if mesh.shape["tp"] == tp and mesh.shape["dp"] * tp == mesh.devices.size:
        return mesh
    if tp < 1 or mesh.devices.size % tp:
        raise ValueError(
            f"to decode with tp {tp} takes a multiple of {tp} devices, and the mesh has {mesh.devices.size}"
        )
    sizes = {**dict.fromkeys(AXES, 1), AXES[0]: mesh.devices.size // tp, "tp": tp}
    return Mesh(mesh.devices.reshape(tuple(sizes.values())), AXES)


def is_split(mesh: Mesh) -> bool:
    """Whether the mesh splits anything but rows."""
    return mesh.shape["dp"] != mesh.devices.size


def layout_for(sizes: Mapping[str, int], mesh: Mesh) -> Layout:
    """How dims of these sizes are split; what does not divide stays whole (see `indivisible`).

    Args:
        sizes: of the dims, in units that cannot be cut.
        mesh: of the devices.
    """
    left_whole = {dim for dim, _, _ in indivisible(sizes, mesh)}
    left_whole |= {"kv_heads"} if "heads" in left_whole else set()
    axes = [(dim, RULES[dim]) for dim in sizes if mesh.shape[RULES[dim]] > 1 and dim not in left_whole]
    return Layout((*axes, *([("tokens", "sp")] if mesh.shape["sp"] > 1 else [])))


def indivisible(sizes: Mapping[str, int], mesh: Mesh) -> list[tuple[str, int, str]]:
    """Dims that do not divide by the mesh axis that would split them: name, size and axis."""
    return [(dim, size, RULES[dim]) for dim, size in sizes.items() if size % mesh.shape[RULES[dim]]]


def check_divides(sizes: Mapping[str, int], mesh: Mesh, replicated: Collection[str] = ()) -> None:
    """See that a mesh can split a model.

    Args:
        sizes: of its dims, in units that cannot be cut.
        mesh: of the devices.
        replicated: dims that may stay whole.

    Raises:
        ValueError: a dim does not divide; all that do not are named.
    """
    unknown = sorted(set(replicated) - set(RULES))
    if unknown:
        raise ValueError(f"mesh_replicate names {', '.join(unknown)}; dims that meshes split are {', '.join(RULES)}")
    found = [each for each in indivisible(sizes, mesh) if each[0] not in replicated]
    if found:
        told = "; ".join(f"{dim} ({size}) does not divide by {axis}={mesh.shape[axis]}" for dim, size, axis in found)
        allowed = " ".join(dict.fromkeys((*replicated, *(dim for dim, _, _ in found))))
        raise ValueError(
            f"mesh {sizes_text(mesh)} cannot split the model: {told}. Choose other sizes, or have these whole on every "
            f"device: mesh_replicate {allowed}"
        )
    if "heads" in sizes and mesh.shape["sp"] > 1:
        parts = mesh.shape["tp"] if sizes["heads"] % mesh.shape["tp"] == 0 else 1
        if sizes["heads"] // parts % mesh.shape["sp"]:
            raise ValueError(
                f"mesh {sizes_text(mesh)}: {sizes['heads'] // parts} heads on each device do not divide by "
                f"sp={mesh.shape['sp']}, over which attention spreads them; choose a smaller sp"
            )


def sizes_text(mesh: Mesh) -> str:
    """The mesh as it is written in settings: the sizes of dp, fsdp, ep, tp and sp."""
    return ",".join(str(size) for size in mesh.shape.values())
