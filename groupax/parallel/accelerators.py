"""Accelerators, the TPU slices that clouds rent out, hosts with GPUs, and this machine's processor. Imports no jax."""

import importlib.util
import logging
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from jaxlib import version


@dataclass(frozen=True)
class Chip:
    """An accelerator, by its maker's figures.

    Attributes:
        kinds: Prefixes of jax's `device_kind` for this chip.
        flops: Dense bfloat16 operations per second, accumulated in float32.
        memory_bytes: Memory available to programs.
        memory_bytes_per_s: Memory bandwidth.
        link_bytes_per_s: Bandwidth in one direction, over all links, to its neighbours or the other GPUs of its host.
        host_bytes_per_s: Bandwidth to or from its host's memory.
        network_bytes_per_s: Its share of the bandwidth between hosts, in one direction; 0 for TPUs, whose links also
            connect hosts, and for GPUs that are planned within one host only.
    """

    kinds: tuple[str, ...]
    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    network_bytes_per_s: float = 0.0


GIB = 1 << 30
# Sources: cloud.google.com/tpu/docs/v4 etc. Memory is what XLA's compiler may use. Google does not state the bandwidth
# of hosts; it is that of 16 PCIe lanes of the third and the fourth generation.
TPUS = {
    "v4": Chip(("TPU v4",), 275e12, 30.75 * GIB, 1228e9, 300e9, 16e9),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 197e12, 15.75 * GIB, 819e9, 200e9, 16e9),
    "v5p": Chip(("TPU v5",), 459e12, 95.74 * GIB, 2765e9, 600e9, 16e9),
    "v6e": Chip(("TPU v6 lite", "TPU v6e"), 918e12, 31.25 * GIB, 1640e9, 448e9, 32e9),
}
# Part of a GPU's memory that arrays and programs get (`parallel.runtime`); the rest is left to CUDA, cuDNN, NCCL and
# CUDA graphs.
GPU_MEMORY_FRAC = 0.9
# Sources: NVIDIA's data sheets of the A100, H100, H200, B200 and L40S, and its white papers on the Ampere, Hopper and
# Ada architectures; of SXM modules, and without sparsity. Memory is what the driver reports, and its bandwidth follows
# from its clock, as in planning/gpu_targets. Links are NVLink (half of the stated bidirectional bandwidth) or 16 PCIe
# lanes, which also lead to the host: of the fourth generation, and of the fifth from the H100 on. The network between
# hosts is that of NVIDIA's DGX: a port for each GPU, of 200 Gb/s for the A100 and 400 Gb/s for the others.
GPUS = {
    "a100": Chip(("NVIDIA A100",), 312e12, 85.10e9 * GPU_MEMORY_FRAC, 2039e9, 300e9, 32e9, 25e9),
    "a100-40g": Chip(("NVIDIA A100-SXM4-40GB",), 312e12, 42.33e9 * GPU_MEMORY_FRAC, 1555e9, 300e9, 32e9, 25e9),
    "h100": Chip(("NVIDIA H100",), 989e12, 84.94e9 * GPU_MEMORY_FRAC, 3352e9, 450e9, 64e9, 50e9),
    "h200": Chip(("NVIDIA H200",), 989e12, 151.40e9 * GPU_MEMORY_FRAC, 4800e9, 450e9, 64e9, 50e9),
    "b200": Chip(("NVIDIA B200",), 2250e12, 191.51e9 * GPU_MEMORY_FRAC, 7672e9, 900e9, 64e9, 50e9),
    "l40s": Chip(("NVIDIA L40S",), 362e12, 47.70e9 * GPU_MEMORY_FRAC, 864e9, 32e9, 32e9),
    "rtx4090": Chip(("NVIDIA GeForce RTX 4090",), 165.2e12, 25.39e9 * GPU_MEMORY_FRAC, 1008e9, 32e9, 32e9),
}
CHIPS = TPUS | GPUS
# Kinds whose slice names count TensorCores, two per chip.
_NAMED_BY_CORES = ("v4", "v5p")
# Chips of the largest slice with a power of two of them.
_MAX_CHIPS = {"v4": 4096, "v5e": 256, "v5p": 4096, "v6e": 256}
_CHIPS_PER_HOST = 4
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p", "v6": "v6e"}
_GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Slice:
    """TPU chips connected by a torus.

    Attributes:
        name: The clouds' name, e.g. v4-64.
        kind: Kind of its chips, a key of `CHIPS`.
        sides: Number of chips along each dimension of the torus.
    """

    name: str
    kind: str
    sides: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """Number of chips, each of which is one device for jax."""
        count = 1
        for side in self.sides:
            count *= side
        return count

    @property
    def chips_per_host(self) -> int:
        """Number of chips of each host: 4, or up to 8 in single-host slices of kinds with a 2D torus."""
        flat = len(self.sides) == 2
        return self.num_chips if self.num_chips <= (8 if flat else _CHIPS_PER_HOST) else _CHIPS_PER_HOST

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.num_chips // self.chips_per_host


def chip_of(device_kind: str) -> Chip | None:
    """Returns the accelerator of jax's `device_kind`; None for a CPU and for those without stated peaks."""
    by_kind = {kind: chip for chip in CHIPS.values() for kind in chip.kinds if device_kind.startswith(kind)}
    return by_kind[max(by_kind, key=len)] if by_kind else None


def tpu_slice(name: str) -> Slice:
    """Returns the slice of this name: v4-64, v5p-128, v5e-32 (or v5litepod-32), v6e-16.

    Raises:
        ValueError: There is no such slice, or its number of chips is not a power of two.
    """
    match = re.fullmatch(r"(?:tpu[ -])?(v\w+)-(\d+)", name.strip().lower())
    kind = match and _ALIASES.get(match[1], match[1])
    if match is None or kind not in TPUS:
        raise ValueError(f"there is no TPU slice {name!r}; kinds of slices are {', '.join(TPUS)}, e.g. v4-64 or v5e-32")
    by_cores = kind in _NAMED_BY_CORES
    num_chips = int(match[2]) // 2 if by_cores else int(match[2])
    smallest = 4 if by_cores else 1
    if (by_cores and int(match[2]) % 2) or num_chips < smallest or num_chips & (num_chips - 1):
        sizes = ", ".join(f"{kind}-{size * (2 if by_cores else 1)}" for size in (smallest, 2 * smallest, 4 * smallest))
        raise ValueError(f"{name!r} is not a known size of a {kind} slice; sizes are {sizes} and so on")
    if num_chips > (most := _MAX_CHIPS[kind]):
        raise ValueError(f"{name!r}: the largest known {kind} slice is {kind}-{most * (1 + by_cores)}")
    return Slice(f"{kind}-{match[2]}", kind, _sides(num_chips, 3 if by_cores else 2))


def _sides(num_chips: int, num_dims: int) -> tuple[int, ...]:
    """Returns nearly equal powers of two, smallest first; a single host of a 3D torus is 2 x 2 x 1."""
    if num_dims == 3 and num_chips == 4:
        return (2, 2, 1)
    sides = [1] * num_dims
    while num_chips > 1:
        sides[sides.index(min(sides))] *= 2
        num_chips //= 2
    return tuple(sorted(sides))


@dataclass(frozen=True)
class GpuHosts:
    """GPUs of one kind, in one host or in several with eight each.

    Attributes:
        name: Kind and number, e.g. h100-16.
        kind: Kind of the GPUs, a key of `GPUS`.
        num_hosts: Number of hosts.
        gpus_per_host: Number of GPUs of each host.
    """

    name: str
    kind: str
    num_hosts: int
    gpus_per_host: int


def gpu_hosts(name: str) -> GpuHosts:
    """Returns the GPUs of this name: a kind and a number of them, e.g. h100-8, rtx4090-1 or h200-64.

    Raises:
        ValueError: There is no such kind, or hosts cannot have this number of GPUs.
    """
    kind, _, number = name.strip().lower().rpartition("-")
    if kind not in GPUS or not re.fullmatch(r"[1-9]\d*", number):
        raise ValueError(
            f"there are no GPUs {name!r}; kinds of GPUs are {', '.join(GPUS)}, e.g. h100-8 for eight of them"
        )
    num_hosts, rest = divmod(int(number), _GPUS_PER_HOST)
    if num_hosts == 0:
        return GpuHosts(f"{kind}-{rest}", kind, 1, rest)
    if rest:
        raise ValueError(
            f"{name!r}: several hosts have {_GPUS_PER_HOST} GPUs each, so that the number must be a multiple"
        )
    if num_hosts > 1 and GPUS[kind].network_bytes_per_s == 0:
        raise ValueError(f"{name!r}: plans for {kind} are limited to one host of at most {_GPUS_PER_HOST} GPUs")
    return GpuHosts(f"{kind}-{number}", kind, num_hosts, _GPUS_PER_HOST)


CPUINFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Returns the model of the processor."""
    name = re.search(r"^model name\s*:(.*)$", _cpuinfo(), re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def _cpuinfo() -> str:
    try:
        return CPUINFO.read_text(encoding="utf-8")
    except OSError:
        return ""


logger = logging.getLogger(__name__)

CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# Only flags whose effect was seen in compiled programs. With matrices that are sharded over fsdp, the threshold makes
# one reduce-scatter of a layer's gradients, sent while the next layer's are computed. Otherwise there are
# several, some of which are waited for.
GPU_FLAGS = {"xla_gpu_reduce_scatter_combine_threshold_bytes": "134217728"}
# XLA ends the process at a flag that it does not know, and flags come and go with its versions.
_JAXLIBS_WITH_FLAGS = ("0.10.",)


def has_cuda_plugin() -> bool:
    """Checks whether jax's plugin for NVIDIA GPUs is installed."""
    return any(map(_is_installed, CUDA_PLUGINS))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False


def set_gpu_flags() -> None:
    """Adds the flags to the environment variable XLA_FLAGS, except for those that it has already.

    A variable that names a file of flags is left as it is.
    """
    if not version.__version__.startswith(_JAXLIBS_WITH_FLAGS):
        logger.info("jaxlib %s may not know groupax's flags for GPUs, so they are not set", version.__version__)
        return
    flags = os.environ.get("XLA_FLAGS", "").split()
    if flags and not flags[0].startswith("--"):
        return
    names = {flag.removeprefix("--").partition("=")[0] for flag in flags}
    added = [f"--{name}={value}" for name, value in GPU_FLAGS.items() if name not in names]
    os.environ["XLA_FLAGS"] = " ".join([*flags, *added])
