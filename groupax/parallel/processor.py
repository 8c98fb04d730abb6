"""The processor of this machine, as far as rounding depends on it."""

import os
import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# Names of XLA's `--xla_cpu_max_isa`, from the narrowest on, and the flags of a processor that has them.
INSTRUCTION_SETS = {
    "SSE4_2": "sse4_2",
    "AVX": "avx",
    "AVX2": "avx2",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX": "amx_tile",
    "AMX_FP16": "amx_fp16",
}


def processor_name() -> str:
    """Returns the model of the processor."""
    name = re.search(r"^model name\s*:(.*)$", _cpuinfo(), re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def instruction_set(xla_flags: str | None = None) -> str:
    """Returns the widest instruction set that compiled programs may use; the architecture where XLA has no choice.

    Args:
        xla_flags: Flags of XLA, of which `--xla_cpu_max_isa` limits it; None for those of the environment.
    """
    features = set(_cpuinfo().split())
    found = [name for name, flag in INSTRUCTION_SETS.items() if flag in features]
    flags = os.environ.get("XLA_FLAGS", "") if xla_flags is None else xla_flags
    limits = re.findall(r"--xla_cpu_max_isa=(\w+)", flags)
    if limits and (limit := limits[-1].upper()) in INSTRUCTION_SETS:
        names = [*INSTRUCTION_SETS]
        found = [name for name in found if names.index(name) <= names.index(limit)]
    return found[-1] if found else platform.machine()


def _cpuinfo() -> str:
    try:
        return CPUINFO.read_text(encoding="utf-8")
    except OSError:
        return ""
