"""Accelerator chips, and the TPU slices that clouds rent out. Imports no jax."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """An accelerator, by its maker's figures.

    Attributes:
        kinds: Prefixes of jax's `device_kind` for this chip.
        flops: Dense bfloat16 operations per second.
        memory_bytes: Memory available to programs; 0 for chips that `groupax plan` does not support.
        memory_bytes_per_s: Memory bandwidth.
        link_bytes_per_s: Bandwidth to its neighbours, over all links, in one direction.
        host_bytes_per_s: Bandwidth to or from its host's memory.
    """

    kinds: tuple[str, ...]
    flops: float
    memory_bytes: float = 0.0
    memory_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    host_bytes_per_s: float = 0.0


GIB = 1 << 30
# Sources: cloud.google.com/tpu/docs/v4 etc., and NVIDIA's data sheets. Memory is what XLA's compiler may use. Makers do
# not state the bandwidth of TPU hosts; it is that of 16 PCIe lanes of the third and the fourth generation.
CHIPS = {
    "v4": Chip(("TPU v4",), 275e12, 30.75 * GIB, 1228e9, 300e9, 16e9),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 197e12, 15.75 * GIB, 819e9, 200e9, 16e9),
    "v5p": Chip(("TPU v5",), 459e12, 95.74 * GIB, 2765e9, 600e9, 16e9),
    "v6e": Chip(("TPU v6 lite", "TPU v6e"), 918e12, 31.25 * GIB, 1640e9, 448e9, 32e9),
    "a100": Chip(("NVIDIA A100",), 312e12),
    "h100": Chip(("NVIDIA H100",), 989e12),
    "h200": Chip(("NVIDIA H200",), 989e12),
    "b200": Chip(("NVIDIA B200",), 2250e12),
}
# Kinds whose slice names count TensorCores, two per chip.
_NAMED_BY_CORES = ("v4", "v5p")
# Chips of the largest slice with a power of two of them.
_MAX_CHIPS = {"v4": 4096, "v5e": 256, "v5p": 4096, "v6e": 256}
_CHIPS_PER_HOST = 4
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p", "v6": "v6e"}


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


def tpu_slice(name: str) -> Slice:
    """Returns the slice of this name: v4-64, v5p-128, v5e-32 (or v5litepod-32), v6e-16.

    Raises:
        ValueError: There is no such slice, or its number of chips is not a power of two.
    """
    match = re.fullmatch(r"(?:tpu[ -])?(v\w+)-(\d+)", name.strip().lower())
    kind = match and _ALIASES.get(match[1], match[1])
    if match is None or kind not in CHIPS:
        known = [kind for kind in CHIPS if kind.startswith("v")]
        raise ValueError(
            f"there is no TPU slice {name!r}; kinds of slices are {', '.join(known)}, e.g. v4-64 or v5e-32"
        )
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
