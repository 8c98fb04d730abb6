"""Prints the instruction sets that this processor has and that tests are run with, by XLA's names."""

import platform
from pathlib import Path


def available(machine: str, flags: set[str]) -> list[str]:
    """Returns values of XLA's `--xla_cpu_max_isa`; none where the processor is no x86-64, which has no such choice."""
    if machine not in ("x86_64", "AMD64"):
        return []
    return [name for name, flag in {"AVX2": "avx2", "AVX512": "avx512f"}.items() if flag in flags]


if __name__ == "__main__":
    cpuinfo = Path("/proc/cpuinfo")
    print(*available(platform.machine(), set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()))
