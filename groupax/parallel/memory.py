"""The limits of the devices: peak operations per second, and memory; and what the C library does with freed memory."""

import ctypes
import functools
import os
import resource
import socket
import time
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from groupax.parallel.accelerators import chip_of
from groupax.parallel.collectives import to_device
from groupax.parallel.processes import all_gather_object

_SIZE, _MATMULS = 768, 4
_CGROUPS = Path("/sys/fs/cgroup")


@functools.cache
def peak_flops(mesh: Mesh, dtype: Any) -> float:
    """Returns the peak operations per second of all devices of the mesh.

    It is the stated peak of known accelerators in bfloat16, and otherwise measured: a fraction of a second of square
    matmuls on all devices at once. Numbers may also be computed in a wider dtype, so the faster of the dtype's matmuls
    and those of float32 count.
    """
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if chip is not None and dtype == jnp.bfloat16:
        return chip.flops * mesh.devices.size
    return max(_measured_flops(mesh, each) for each in {jnp.dtype(dtype), jnp.dtype(jnp.float32)})


def _measured_flops(mesh: Mesh, dtype: Any) -> float:
    num_devices = mesh.devices.size
    pspec = PartitionSpec(mesh.axis_names)

    def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
        # accumulated in float32: a CPU accumulates bfloat16 in software
        return (jnp.matmul(x, y, preferred_element_type=jnp.float32) * 0.01).astype(x.dtype)

    def matmuls(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _MATMULS, lambda _, y: matmul(y, x[0]), x[0])[None]

    program = jax.jit(jax.shard_map(matmuls, mesh=mesh, in_specs=pspec, out_specs=pspec))
    x = to_device(jnp.ones((num_devices, _SIZE, _SIZE), dtype), NamedSharding(mesh, pspec))
    seconds = float("inf")
    for _ in range(4):  # the first one compiles
        started_s = time.perf_counter()
        jax.block_until_ready(program(x))
        seconds = min(seconds, time.perf_counter() - started_s)
    return num_devices * _MATMULS * 2.0 * _SIZE**3 / seconds


def peak_memory_bytes(mesh: Mesh) -> float:
    """Returns the peak memory of the fullest local device; on CPU, that of the process."""
    peaks = [
        stats["peak_bytes_in_use"]
        for device in mesh.local_devices
        if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats
    ]
    return float(max(peaks)) if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def memory_in_use(mesh: Mesh) -> dict[str, float]:
    """Returns bytes in use: by the process, by arrays on this host's devices, and, where reported, on the fullest."""
    arrays = sum(shard.data.nbytes for array in jax.live_arrays() for shard in array.addressable_shards)
    in_use = [stats["bytes_in_use"] for device in mesh.local_devices if (stats := device.memory_stats())]
    own = {"memory/process_bytes": _process_bytes(), "memory/arrays_bytes": float(arrays)}
    return own | ({"memory/device_bytes": float(max(in_use))} if in_use else {})


def _process_bytes() -> float:
    """Returns the resident memory of this process, or its peak where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return float(pages * resource.getpagesize())


def free_memory_bytes(mesh: Mesh) -> float:
    """Returns the free memory of the fullest device; on CPU, each device's share of the fullest machine's free memory.

    A container's limit counts like its machine's. All processes must call this, and receive the same number.

    Raises:
        RuntimeError: Neither the devices nor the system report their memory.
    """
    stats = [stats for device in mesh.local_devices if (stats := device.memory_stats()) and "bytes_limit" in stats]
    if stats:
        return min(all_gather_object(float(min(each["bytes_limit"] - each["bytes_in_use"] for each in stats))))
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError as error:
        raise RuntimeError("the devices do not report how much memory they have; set kv_bytes") from error
    available = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024.0
    free = min(available, container_free_bytes(_text(Path("/proc/self/cgroup")), _CGROUPS))
    machines = all_gather_object((socket.gethostname(), len(mesh.local_devices), free))
    num_devices = {name: sum(num for other, num, _ in machines if other == name) for name, _, _ in machines}
    return min(num_bytes / num_devices[name] for name, _, num_bytes in machines)


def container_free_bytes(cgroups: str, root: Path) -> float:
    """Returns the memory left to a process by its control group (version 2) and its ancestors; infinite without limits.

    Inactive file caches count as free, since the system reclaims them. `cgroups` is the content of `/proc/self/cgroup`.
    """
    left = float("inf")
    path = next((line.removeprefix("0::") for line in cgroups.splitlines() if line.startswith("0::")), "")
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for folder in (root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)):
        most, used = (_text(folder / f"memory.{name}").strip() for name in ("max", "current"))
        if most.isdecimal() and used.isdecimal():  # not "max", nor empty, as a file that a container cannot see
            stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            left = min(left, max(0.0, float(int(most) - int(used) + int(stat.get("inactive_file", 0)))))
    return left


def _text(path: Path) -> str:
    """Returns the content of a file, or an empty string if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


# <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
NEVER = -1


def keep_freed_memory() -> None:
    """Makes the allocator reuse freed blocks instead of returning them to the operating system.

    Each program on the CPU allocates its temporaries, which the operating system clears page by page: a third of an
    update of a model of 135 million parameters. Call this before jax starts threads. It does nothing with C libraries
    other than glibc, where accelerators may do the work, and where the environment already configures malloc.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    has_accelerators = bool(entry_points(group="jax_plugins")) or find_spec("libtpu") is not None
    if chosen or mallopt is None or has_accelerators:
        return
    mallopt(M_ARENA_MAX, 1)  # other arenas map large blocks and unmap them when they are freed
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, NEVER)
