"""The C library's treatment of memory that programs on the CPU free."""

import ctypes
import os
from importlib.metadata import entry_points
from importlib.util import find_spec

# <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST_KEPT_BYTES = 1 << 30
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Makes the allocator reuse freed blocks of up to a gibibyte instead of returning them to the operating system.

    Each program on the CPU allocates its temporaries, which the operating system clears page by page: an eighth of a
    training step's time. Call this before jax starts threads. It does nothing with C libraries other than glibc, where
    accelerators may do the work, and where the environment already configures malloc.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if chosen or mallopt is None or _may_have_accelerators():
        return
    mallopt(M_ARENA_MAX, 1)  # other arenas map large blocks and unmap them when they are freed
    mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    mallopt(M_TRIM_THRESHOLD, NEVER)


def _may_have_accelerators() -> bool:
    return bool(entry_points(group="jax_plugins")) or find_spec("libtpu") is not None
