"""What the devices can do at most: operations per second and memory."""

import functools
import resource
import socket
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from groupax.parallel.accelerators import CHIPS
from groupax.parallel.processes import all_gather_object
from groupax.parallel.transfer import to_device

_SIZE, _PRODUCTS = 768, 4
_CGROUPS = Path("/sys/fs/cgroup")


@functools.cache
def peak_flops(mesh: Mesh, dtype: Any) -> float:
    """Operations per second of all devices of the mesh: as stated for known accelerators in bfloat16, else measured.

    The measurement multiplies square matrices on all devices at once, and takes a fraction of a second. What is wide
    enough holds narrower numbers too: of the dtype's products and those of float32 the faster ones count.
    """
    kind = mesh.devices.flat[0].device_kind
    stated = [chip.flops for chip in CHIPS.values() if kind.startswith(chip.kinds)]
    if stated and dtype == jnp.bfloat16:
        return stated[0] * mesh.devices.size
    return max(_measured_flops(mesh, each) for each in {jnp.dtype(dtype), jnp.dtype(jnp.float32)})


def _measured_flops(mesh: Mesh, dtype: Any) -> float:
    num_devices = mesh.devices.size
    split = PartitionSpec(mesh.axis_names)

    def times(x: jax.Array, y: jax.Array) -> jax.Array:
        # sums in float32: those of bfloat16 itself a CPU computes in software
        return (jnp.matmul(x, y, preferred_element_type=jnp.float32) * 0.01).astype(x.dtype)

    def products(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _PRODUCTS, lambda _, y: times(y, x[0]), x[0])[None]

    program = jax.jit(jax.shard_map(products, mesh=mesh, in_specs=split, out_specs=split))
    x = to_device(jnp.ones((num_devices, _SIZE, _SIZE), dtype), NamedSharding(mesh, split))
    seconds = float("inf")
    for _ in range(4):  # the first one compiles
        started_s = time.perf_counter()
        jax.block_until_ready(program(x))
        seconds = min(seconds, time.perf_counter() - started_s)
    return num_devices * _PRODUCTS * 2.0 * _SIZE**3 / seconds


def peak_memory_bytes(mesh: Mesh) -> float:
    """The most memory in use so far on any local device; on CPU that of the process."""
    peaks = [
        stats["peak_bytes_in_use"]
        for device in mesh.local_devices
        if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats
    ]
    return float(max(peaks)) if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def memory_in_use(mesh: Mesh) -> dict[str, float]:
    """Bytes in use now: of the process, of arrays on this host's devices, and, where devices say so, of the fullest."""
    arrays = sum(shard.data.nbytes for array in jax.live_arrays() for shard in array.addressable_shards)
    in_use = [stats["bytes_in_use"] for device in mesh.local_devices if (stats := device.memory_stats())]
    own = {"memory/process_bytes": _process_bytes(), "memory/arrays_bytes": float(arrays)}
    return own | ({"memory/device_bytes": float(max(in_use))} if in_use else {})


def _process_bytes() -> float:
    """Resident memory of this process; its peak where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return float(pages * resource.getpagesize())


def free_memory_bytes(mesh: Mesh) -> float:
    """Memory that is free on the fullest device; on CPU each device's part of what the fullest machine has left.

    A container's limit counts as its machine's. With several processes all must call this, and all get the same.

    Raises:
        RuntimeError: neither the devices nor the system say.
    """
    stats = [stats for device in mesh.local_devices if (stats := device.memory_stats()) and "bytes_limit" in stats]
    if stats:
        return min(all_gather_object(float(min(each["bytes_limit"] - each["bytes_in_use"] for each in stats))))
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError as error:
        raise RuntimeError("the devices do not say how much memory they have; set kv_bytes") from error
    available = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024.0
    free = min(available, container_free_bytes(_text(Path("/proc/self/cgroup")), _CGROUPS))
    machines = all_gather_object((socket.gethostname(), len(mesh.local_devices), free))
    num_devices = {name: sum(num for other, num, _ in machines if other == name) for name, _, _ in machines}
    return min(num_bytes / num_devices[name] for name, _, num_bytes in machines)


def container_free_bytes(cgroups: str, root: Path) -> float:
    """What the limits of a process's control groups and of the groups around them leave it; infinite without any.

    What files keep in memory without being read counts as free: the system takes it back.

    Args:
        cgroups: `/proc/self/cgroup`: lines of number:controllers:path, of version 2 without controllers.
        root: where control groups are mounted.
    """
    left = float("inf")
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limit, usage, cache, top = "memory.max", "memory.current", "inactive_file", root
        elif "memory" in controllers.split(","):
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            top = root / "memory"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for folder in (top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)):
            most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
            if most.isdecimal() and used.isdecimal():  # "max" is no limit; what a container is not shown is empty
                stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
                left = min(left, max(0.0, float(int(most) - int(used) + int(stat.get(cache, 0)))))
    return left


def _text(path: Path) -> str:
    """What is in a file; nothing if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
