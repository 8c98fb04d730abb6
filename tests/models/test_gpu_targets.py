"""NVIDIA GPUs to compile for, which may be absent: their names, figures and targets."""

import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from groupax.parallel.accelerators import GPU_MEMORY_FRAC, GPUS, GpuHosts, gpu_hosts
from groupax.parallel.runtime import _use_most_of_a_gpu
from groupax.planning.devices import prepare

CUDA = Path(__file__).parents[2] / "build" / "cuda"
needs_cuda = pytest.mark.skipif(
    not (CUDA / "jax_plugins").is_dir(),
    reason="jax's CUDA plugin is not in build/cuda; `groupax plan` says how to get it",
)


def numbers(kind):
    text = files("groupax.planning").joinpath("gpu_targets", f"{kind}.txtpb").read_text()
    return {name: float(value) for name, value in re.findall(r"^  (\w+): ([\d.]+)$", text, re.MULTILINE)}


def test_every_gpu_has_a_target_with_the_same_figures():
    texts = {path.name.removesuffix(".txtpb") for path in files("groupax.planning").joinpath("gpu_targets").iterdir()}
    assert texts == set(GPUS)
    for kind, chip in GPUS.items():
        target = numbers(kind)
        assert chip.memory_bytes == pytest.approx(GPU_MEMORY_FRAC * target["device_memory_size"], rel=1e-4)
        assert chip.memory_bytes_per_s == pytest.approx(target["memory_bandwidth"], rel=1e-3)


def test_data_sheets_arithmetic_follows_from_cores_and_clocks():
    # operations of a multiprocessor in a clock: bfloat16 products of tensor cores, accumulated in float32
    per_clock = {"a100": 2048, "a100-40g": 2048, "h100": 4096, "h200": 4096, "b200": 8192, "l40s": 1024, "rtx4090": 512}
    for kind, chip in GPUS.items():
        target = numbers(kind)
        at_boost = per_clock[kind] * target["core_count"] * target["clock_rate_ghz"] * 1e9
        assert 0.9 < chip.flops / at_boost <= 1.01, kind
        assert chip.fp8_flops in (0, pytest.approx(2 * chip.flops, rel=0.02))


def test_names_of_gpus():
    assert gpu_hosts("H100-3 ") == GpuHosts("h100-3", "h100", 1, 3)
    assert gpu_hosts("a100-40g-8") == GpuHosts("a100-40g-8", "a100-40g", 1, 8)
    assert gpu_hosts("h100-64") == GpuHosts("h100-64", "h100", 8, 8)


def test_a_missing_plugin_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("groupax.planning.devices.has_cuda_plugin", lambda: False)
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(
        ValueError, match=rf"none in {tmp_path}; get it with pip install 'groupax\[cuda\]', or .* --target"
    ):
        prepare("h100-8", cuda=tmp_path)


def test_programs_may_have_most_of_a_gpus_memory(monkeypatch):
    monkeypatch.setattr("os.environ", {})
    _use_most_of_a_gpu()
    assert os.environ == {"XLA_CLIENT_MEM_FRACTION": str(GPU_MEMORY_FRAC)}
    os.environ.clear()
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.5"
    _use_most_of_a_gpu()
    assert os.environ == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "the user's choice"


FOUND = """
import sys
from pathlib import Path
from groupax.planning.devices import find_target, prepare
name, cuda = sys.argv[1:]
prepare(name, cuda=Path(cuda))
target = find_target(name)
import jax
first, last = target.devices[0], target.devices[-1]
print(len(target.devices), first.platform, first.device_kind, last.process_index, jax.default_backend(), sep=";")
"""


@needs_cuda
@pytest.mark.heavy
@pytest.mark.parametrize("kind", GPUS)
def test_absent_gpus_come_up_on_a_machine_without_any(kind):
    name = f"{kind}-16" if GPUS[kind].network_bytes_per_s else f"{kind}-8"
    done = subprocess.run([sys.executable, "-c", FOUND, name, str(CUDA)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number, platform, device_kind, last_host, default = done.stdout.strip().split(";")
    assert (int(number), platform, default) == (int(name.rpartition("-")[2]), "gpu", "cpu")
    assert device_kind.startswith(GPUS[kind].kinds)
    assert int(last_host) == int(number) // 8 - 1
    assert done.stderr == "", "the plugin has nothing to complain about"
