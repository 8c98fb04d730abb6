"""Accelerators, the TPU slices that clouds rent out, hosts with GPUs, and this machine's processor. Imports no jax."""

import importlib.util
import logging
import math
import os
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path

from jaxlib import version

from groupax.core.settings.fields import nearest


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
    "v5e": Chip(("TPU v5 lite", "TPU v5e", "TPU v5litepod"), 197e12, 15.75 * GIB, 819e9, 200e9, 16e9),
    "v5p": Chip(("TPU v5", "TPU v5p"), 459e12, 95.74 * GIB, 2765e9, 600e9, 16e9),
    "v6e": Chip(("TPU v6 lite", "TPU v6e"), 918e12, 31.25 * GIB, 1640e9, 448e9, 32e9),
}
# Part of a GPU's memory that arrays and programs get (`parallel.runtime`); the rest is left to CUDA, cuDNN, NCCL and
# CUDA graphs.
GPU_MEMORY_FRAC = 0.9


@dataclass(frozen=True)
class Gpu(Chip):
    """An NVIDIA GPU, with what XLA's compiler has to know of it.

    Attributes:
        architecture: Name of the file in planning/gpu_targets with its limits.
        device_bytes: Memory that the driver reports.
        num_cores: Number of multiprocessors.
        clock_ghz: Highest clock.
        l2_bytes: Size of the second-level cache.
    """

    architecture: str = ""
    device_bytes: float = 0.0
    num_cores: int = 0
    clock_ghz: float = 0.0
    l2_bytes: int = 0


def _gpu(kind: str, figures: str) -> Gpu:
    """Returns a GPU by jax's `device_kind` and its figures, in the order and the units of the table below."""
    architecture, *numbers = figures.split()
    tflops, memory, bandwidth, cores, clock, l2, link, host, network = map(float, numbers)
    return Gpu(
        (kind,),
        tflops * 1e12,
        memory * 1e9 * GPU_MEMORY_FRAC,
        bandwidth * 1e9,
        link * 1e9,
        host * 1e9,
        network * 1e9,
        architecture,
        memory * 1e9,
        int(cores),
        clock,
        int(l2 * 1e6),
    )


# Sources: NVIDIA's data sheets and its white papers on the Turing, Ampere, Ada, Hopper and Blackwell architectures; of
# SXM modules where there are any, and without sparsity. The T4 has no bfloat16: its figure is that of float32. Memory
# is what drivers report. Links are NVLink (half of the stated bidirectional bandwidth) or 16 PCIe lanes, which also
# lead to the host, except for the GH200. The network between hosts is that of NVIDIA's DGX: a port for each GPU, of 200
# Gb/s for the A100 and 400 Gb/s for the others.
#              architecture, TFLOP/s, GB, GB/s, multiprocessors, GHz, MB of L2 cache, GB/s of links, host, network
GPUS = {
    "t4": _gpu("Tesla T4", "sm75 8.1 15.64 320 40 1.59 4.19 16 16 0"),
    "a10": _gpu("NVIDIA A10", "sm86 125 23.61 600 72 1.695 6.29 32 32 0"),
    "l4": _gpu("NVIDIA L4", "sm89 121 23.66 300 58 2.04 50.33 32 32 0"),
    "l40s": _gpu("NVIDIA L40S", "sm89 362 47.70 864 142 2.52 100.66 32 32 0"),
    "rtx3090": _gpu("NVIDIA GeForce RTX 3090", "sm86 71 25.44 936 82 1.695 6.29 32 32 0"),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", "sm89 165.2 25.39 1008 128 2.52 75.50 32 32 0"),
    "rtx5090": _gpu("NVIDIA GeForce RTX 5090", "sm120 209.5 33.67 1792 170 2.407 100.66 64 64 0"),
    "rtx6000-ada": _gpu("NVIDIA RTX 6000 Ada", "sm89 364.2 50.95 960 142 2.505 100.66 32 32 0"),
    "rtx-pro-6000": _gpu("NVIDIA RTX PRO 6000", "sm120 503.8 101.97 1792 188 2.6 134.22 64 64 0"),
    "a100-40g": _gpu("NVIDIA A100-SXM4-40GB", "sm80 312 42.33 1555 108 1.41 41.94 300 32 25"),
    "a100": _gpu("NVIDIA A100", "sm80 312 85.10 2039 108 1.41 41.94 300 32 25"),
    "h20": _gpu("NVIDIA H20", "sm90 148 101.97 4000 78 1.98 62.91 450 64 50"),
    "h100": _gpu("NVIDIA H100", "sm90 989 84.94 3352 132 1.98 52.43 450 64 50"),
    "h200": _gpu("NVIDIA H200", "sm90 989 151.40 4800 132 1.98 52.43 450 64 50"),
    "gh200": _gpu("NVIDIA GH200", "sm90 989 101.97 4000 132 1.98 62.91 450 450 50"),
    "b200": _gpu("NVIDIA B200", "sm100 2250 191.51 7672 148 1.965 132.64 900 64 50"),
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
        return math.prod(self.sides)

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
    by_kind = {kind: chip for chip in CHIPS.values() for kind in chip.kinds if _is_of_kind(device_kind, kind)}
    return by_kind[max(by_kind, key=len)] if by_kind else None


def _is_of_kind(device_kind: str, kind: str) -> bool:
    return device_kind.startswith(kind) and not device_kind[len(kind) : len(kind) + 1].isalnum()


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
        chip: The GPUs.
        num_hosts: Number of hosts.
        gpus_per_host: Number of GPUs of each host.
    """

    name: str
    chip: Gpu
    num_hosts: int
    gpus_per_host: int


_NUMBER = r"(\d+(?:\.\d+)?)"
_CUSTOM = re.compile(rf"custom:{_NUMBER}gb,{_NUMBER}gb/s,{_NUMBER}tf")


def gpu_hosts(name: str) -> GpuHosts:
    """Returns the GPUs of this name: a kind and a number of them, e.g. h100-8, rtx4090-1 or h200-64.

    A kind may consist of figures, "custom:24GB,1008GB/s,165TF": its memory, bandwidth and bfloat16 operations per
    second, with all else from the known GPU that is nearest in the latter two.

    Raises:
        ValueError: There is no such kind, or hosts cannot have this number of GPUs.
    """
    kind, _, number = name.strip().lower().rpartition("-")
    chip = _custom_gpu(kind) if kind.startswith("custom:") else GPUS.get(kind)
    if chip is None or not re.fullmatch(r"[1-9]\d*", number):
        raise ValueError(
            f"there are no GPUs {name!r}; kinds of GPUs are {', '.join(GPUS)}, e.g. h100-8 for eight of them, or your "
            f"own figures, custom:24GB,1008GB/s,165TF-1{nearest(kind, GPUS)}"
        )
    num_hosts, rest = divmod(int(number), _GPUS_PER_HOST)
    if num_hosts == 0:
        return GpuHosts(f"{kind}-{rest}", chip, 1, rest)
    if rest:
        raise ValueError(
            f"{name!r}: several hosts have {_GPUS_PER_HOST} GPUs each, so that the number must be a multiple"
        )
    if num_hosts > 1 and chip.network_bytes_per_s == 0:
        raise ValueError(f"{name!r}: plans for {kind} are limited to one host of at most {_GPUS_PER_HOST} GPUs")
    return GpuHosts(f"{kind}-{number}", chip, num_hosts, _GPUS_PER_HOST)


def _custom_gpu(kind: str) -> Gpu | None:
    match = _CUSTOM.fullmatch(kind)
    if match is None:
        return None
    memory, bandwidth, flops = float(match[1]) * 1e9, float(match[2]) * 1e9, float(match[3]) * 1e12
    if not min(memory, bandwidth, flops) > 0:
        return None

    def distance(known: Gpu) -> float:
        return abs(math.log(known.memory_bytes_per_s / bandwidth)) + abs(math.log(known.flops / flops))

    return replace(
        min(GPUS.values(), key=distance),
        kinds=(kind,),
        flops=flops,
        device_bytes=memory,
        memory_bytes=memory * GPU_MEMORY_FRAC,
        memory_bytes_per_s=bandwidth,
    )


CPUINFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Returns the model of the processor."""
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    name = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


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
    return importlib.util.find_spec("jax_plugins") is not None and any(map(importlib.util.find_spec, CUDA_PLUGINS))


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
