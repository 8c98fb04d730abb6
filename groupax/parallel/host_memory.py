"""How the C library treats memory that programs on the CPU give back."""

import ctypes
import os
from importlib.metadata import entry_points
from importlib.util import find_spec

# Of <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST_KEPT_BYTES = 1 << 30
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Memory that is given back is used again instead of asked for anew, up to a gibibyte in one piece.

    Each program on the CPU takes its temporaries anew, and the operating system clears them page by page: an eighth of
    a training step's time. To be called before jax has threads. Nothing changes with another C library than glibc,
    where accelerators may do the work, or where the environment already says how memory is treated.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if chosen or mallopt is None or _may_have_accelerators():
        return
    mallopt(M_ARENA_MAX, 1)  # other arenas take large pieces from the operating system and give them back to it
    mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    mallopt(M_TRIM_THRESHOLD, NEVER)


def _may_have_accelerators() -> bool:
    return bool(entry_points(group="jax_plugins")) or find_spec("libtpu") is not None
