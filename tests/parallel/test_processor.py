"""What is recorded of a processor."""

import pytest

from groupax.parallel import accelerators as processor

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu sse4_2 avx avx2 avx512f avx512_vnni amx_tile
"""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "AMX"),
        ("--xla_cpu_max_isa=AVX2", "AVX2"),
        ("--xla_cpu_max_isa=avx512 --other=1", "AVX512"),
        ("--xla_cpu_max_isa=AVX2 --xla_cpu_max_isa=AVX512_BF16", "AVX512_VNNI"),  # the last one counts
        ("--xla_cpu_max_isa=NONSENSE", "AMX"),
    ],
)
def test_programs_use_the_widest_set_that_they_may(tmp_path, monkeypatch, flags, expected):
    path = tmp_path / "cpuinfo"
    path.write_text(XEON)
    monkeypatch.setattr(processor, "CPUINFO", path)
    assert processor.processor_name() == "Intel(R) Xeon(R) Processor"
    assert processor.instruction_set(flags) == expected


def test_a_machine_without_cpuinfo_has_its_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(processor.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(processor.platform, "processor", lambda: "")
    assert processor.processor_name() == processor.instruction_set() == "aarch64"
