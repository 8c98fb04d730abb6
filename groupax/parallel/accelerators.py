"""What accelerators are: chips, and the slices of them that clouds rent out. Imports no jax."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One accelerator, by its maker's figures.

    Attributes:
        kinds: what jax calls such a device, by its beginning.
        flops: dense bfloat16 operations per second.
        memory_bytes: that programs may have; 0 where slices are not planned for.
        memory_bytes_per_s: to and from that.
        link_bytes_per_s: to its neighbours, over all links, one way.
        host_bytes_per_s: to or from the memory of its host.
    """

    kinds: tuple[str, ...]
    flops: float
    memory_bytes: float = 0.0
    memory_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    host_bytes_per_s: float = 0.0


GIB = 1 << 30
# cloud.google.com/tpu/docs/v4 and so on; NVIDIA's data sheets. Memory is what XLA's compiler says that it may use. Of
# TPUs' hosts there is no figure of the maker's: it is that of 16 lanes of PCIe, of the third and the fourth generation.
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
# Kinds whose names count TensorCores, of which a chip has two.
_NAMED_BY_CORES = ("v4", "v5p")
# Chips of the largest slice whose number of chips is a power of two.
_MOST_CHIPS = {"v4": 4096, "v5e": 256, "v5p": 4096, "v6e": 256}
_CHIPS_PER_HOST = 4
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p", "v6": "v6e"}


@dataclass(frozen=True)
class Slice:
    """TPU chips that are wired to each other.

    Attributes:
        name: as clouds call it, e.g. v4-64.
        kind: of its chips, one of `CHIPS`.
        sides: chips along each direction of the torus.
    """

    name: str
    kind: str
    sides: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """Chips, each one device for jax."""
        count = 1
        for side in self.sides:
            count *= side
        return count

    @property
    def chips_per_host(self) -> int:
        """Chips of each machine: 4, but that up to 8 of the flat kinds may share one."""
        flat = len(self.sides) == 2
        return self.num_chips if self.num_chips <= (8 if flat else _CHIPS_PER_HOST) else _CHIPS_PER_HOST

    @property
    def num_hosts(self) -> int:
        """Machines."""
        return self.num_chips // self.chips_per_host


def tpu_slice(name: str) -> Slice:
    """The slice of this name: v4-64, v5p-128, v5e-32 (or v5litepod-32), v6e-16.

    Raises:
        ValueError: there is none, or its number of chips is no power of two.
    """
    match = re.fullmatch(r"(?:tpu[ -])?(v\w+)-(\d+)", name.strip().lower())
    kind = match and _ALIASES.get(match[1], match[1])
    if match is None or kind not in CHIPS:
        known = [kind for kind in CHIPS if kind.startswith("v")]
        raise ValueError(f"there is no TPU slice {name!r}; slices are of {', '.join(known)}, e.g. v4-64 or v5e-32")
    by_cores = kind in _NAMED_BY_CORES
    num_chips = int(match[2]) // 2 if by_cores else int(match[2])
    smallest = 4 if by_cores else 1
    if (by_cores and int(match[2]) % 2) or num_chips < smallest or num_chips & (num_chips - 1):
        sizes = ", ".join(f"{kind}-{size * (2 if by_cores else 1)}" for size in (smallest, 2 * smallest, 4 * smallest))
        raise ValueError(f"{name!r} is no size of a slice of {kind} that is known; those are {sizes} and so on")
    if num_chips > (most := _MOST_CHIPS[kind]):
        raise ValueError(f"{name!r}: the largest slice of {kind} that is known is {kind}-{most * (1 + by_cores)}")
    return Slice(f"{kind}-{match[2]}", kind, _sides(num_chips, 3 if by_cores else 2))


def _sides(num_chips: int, num_directions: int) -> tuple[int, ...]:
    """About equal powers of two, smallest first; the first hosts of three directions are 2 x 2 x 1."""
    if num_directions == 3 and num_chips == 4:
        return (2, 2, 1)
    sides = [1] * num_directions
    while num_chips > 1:
        sides[sides.index(min(sides))] *= 2
        num_chips //= 2
    return tuple(sorted(sides))
