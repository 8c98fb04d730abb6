"""Prints the flags with which XLA compiles soonest for CPUs, of these the ones that the installed XLA knows.

Programs are compiled in one piece each, unoptimized, and without the emitters that go through MLIR: together about half
the time. XLA ends a process that gives it a flag of another version.
"""

import mmap
from pathlib import Path

import jaxlib

FLAGS = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_parallel_codegen_split_count": "1",
    "xla_cpu_use_fusion_emitters": "false",
}


def known() -> set[str]:
    """The flags whose names are in one of jaxlib's libraries."""
    names = set()
    for library in Path(jaxlib.__file__).parent.rglob("*.so*"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            names |= {name for name in FLAGS.keys() - names if content.find(name.encode()) >= 0}
    return names


if __name__ == "__main__":
    found = known()
    print(*(f"--{name}={value}" for name, value in FLAGS.items() if name in found))
