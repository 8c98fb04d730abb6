"""Kernels that a device does not run well are found in another process and left out; `groupax doctor` shows them."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from groupax import GRPOConfig
from groupax.models import attention
from groupax.models.families import read_config
from groupax.models.kernels.check import EMULATED, examined
from groupax.models.kernels.fused_attention import select_attend_past, select_fused_attention
from groupax.parallel import kernels
from groupax.runs.diagnostics import setup_diagnostics
from groupax.satellites.doctor import gpu_row
from tests.conftest import TINY
from tests.models.sabotage import BROKEN, CASE, SLOW

H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
CONFIG = read_config(TINY)


@pytest.mark.parametrize(("how", "fault"), [("wrong", "wrong by 0.8"), ("nan", "not finite"), ("right", "")])
def test_a_kernel_that_is_wrong_by_one_percent_is_found(how, fault):
    found = examined("grouped_matmul", replace(CASE, kernel=BROKEN[how]), is_emulated=True)
    assert fault in found.fault
    assert bool(fault) == bool(found.fault)


def test_a_kernel_that_is_slower_than_the_plain_form_is_found_unless_it_is_emulated():
    assert "ms, and the plain form" in examined("grouped_matmul", SLOW, is_emulated=False).fault
    assert not examined("grouped_matmul", SLOW, is_emulated=True).fault


@pytest.mark.heavy
def test_a_kernel_that_ends_or_hangs_its_process_does_not_keep_the_others_from_being_checked():
    found = kernels.examined_kernels("tests.models.sabotage:CHECKS", case_s=20.0)
    faults = kernels.faults_in(found)
    assert faults.keys() == BROKEN.keys() - {"right"}
    assert faults["raises"] == "its process ended with status 1: NotImplementedError: no such instruction"
    assert faults["dies"] == "its process ended with status 11: "
    assert faults["hangs"] == "its process does not end within 20 s"
    assert found[-1]["kernel"] == "right"


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize("check", EMULATED, ids=lambda check: check.kernel)
def test_the_kernels_themselves_pass(check):
    with jax.numpy_dtype_promotion("standard"):  # in bfloat16, jax.nn's attention promotes to float32
        found = [examined(check.kernel, case, is_emulated=True) for case in check.cases(True)]
    assert found
    assert not [each for each in found if each.fault]


@pytest.fixture
def faults(monkeypatch):
    found: dict[str, str] = {}
    monkeypatch.setattr(kernels, "_faults", found)
    monkeypatch.setattr(kernels, "_once", SimpleNamespace(acquire=lambda **_: True))
    return found


def test_a_run_goes_on_with_the_plain_form(faults):
    select = partial(select_fused_attention, device=H100, config=CONFIG, dtype="bfloat16")
    assert select("auto").kernel == "cudnn"
    assert select_attend_past(H100, CONFIG).__module__.endswith("triton_attention")
    faults.update(cudnn="it is wrong by 1.2%", decode_attention="it hangs")
    assert select("auto") is None
    assert select_attend_past(H100, CONFIG).func is attention.attend_past
    with pytest.raises(ValueError, match=r"'fused', but its kernel was left out on this machine: it is wrong by 1.2%"):
        select("fused")
    found = setup_diagnostics(GRPOConfig(), [1])
    assert found["kernel/cudnn"].startswith("the kernel is left out, since it is wrong by 1.2%; the plain form takes")


def test_what_is_found_is_kept_until_the_driver_changes(faults, monkeypatch, tmp_path, caplog):
    gpus, calls = ["NVIDIA H100, 580.1"], []

    def examine():
        calls.append(len(calls))
        return [{"kernel": "cudnn", "case": "a", "fault": ""}, {"kernel": "cudnn", "case": "b", "fault": "it is slow"}]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(kernels, "nvidia_gpus", lambda: gpus)
    monkeypatch.setattr(kernels, "examined_kernels", examine)
    for _ in range(2):
        kernels.find_kernel_faults()
    assert (calls, faults) == ([0], {"cudnn": "it is slow"})
    assert "the kernel cudnn is left out" in caplog.text
    gpus[0] = "NVIDIA H100, 590.1"
    kernels.find_kernel_faults()
    assert len(calls) == 2

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    kernels.find_kernel_faults()
    assert len(calls) == 3
    monkeypatch.setattr(
        kernels, "examined_kernels", lambda: [{"kernel": "cudnn", "case": "a", "fault": "out of memory"}]
    )
    for _ in range(2):
        assert "out of memory" in kernels.known_findings(["NVIDIA A10, 1.1"])[0]["fault"]
        assert not kernels.cache_file(["NVIDIA A10, 1.1"]).exists()

    def fail():
        raise OSError("no device")

    gpus[0] = "NVIDIA H100, 600.1"
    monkeypatch.setattr(kernels, "examined_kernels", fail)
    kernels.find_kernel_faults()
    assert faults.keys() == set(kernels.NVIDIA_KERNELS)
    faults.clear()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    kernels.find_kernel_faults()
    assert not faults


@pytest.mark.parametrize(
    ("gpus", "plugins", "found", "remedy"),
    [
        ([], [], "none", ""),
        ([], ["cuda13"], "none, but jax has the plugin of cuda13", "nvidia-smi does not answer"),
        (["NVIDIA H100, 580.65.06"], ["cuda13"], "1 x NVIDIA H100, driver 580.65.06, cuda13", ""),
        (["NVIDIA H100, 580.65.06"], [], "without jax's plugin", "pip install 'groupax[cuda13]'"),
        (["NVIDIA A10, 535.1"], [], "without jax's plugin", "pip install 'groupax[cuda12]'"),
        (["NVIDIA A10, 535.1"], ["cuda13"], "too old for cuda13", "pip install 'groupax[cuda12]'"),
        (["Tesla T4, 470.1"], ["cuda12"], "driver 470.1", "the driver is too old: CUDA 12 needs 525"),
    ],
)
def test_drivers_and_plugins_fit_or_there_is_a_command(gpus, plugins, found, remedy):
    row = gpu_row(gpus, plugins)
    assert found in row.found
    assert remedy in row.remedy
    assert bool(remedy) == bool(row.remedy)


@pytest.mark.heavy
def test_what_a_device_is_asked_first_works_on_this_machine(tmp_path):
    """The acceptance of a lent GPU, with tiny shapes; `groupax doctor` is its first part."""
    out = tmp_path / "out.json"
    script = Path(__file__).parents[2] / "dev" / "on_device.py"
    command = [sys.executable, str(script), "run", str(out), "--emulate", "--seconds", "1200"]
    subprocess.run(command, check=True, timeout=1300, capture_output=True)
    found = json.loads(out.read_text())
    assert {name: found[name]["fault"] for name in found["seconds"] if "fault" in found[name]} == {}
    assert found["doctor"]["numbers"]["peaks"]["bytes_per_s"] > 1e8
    assert "a small model trains" in found["doctor"]["rows"][-1]["found"]
    assert found["tiny, all weights"]["logp_diff_max"] < 1e-4
    assert found["kill and resume"] == {"same_bits": True, "steps": 6}
    shown = subprocess.run([*command[:2], "table", str(out)], check=True, capture_output=True, text=True).stdout
    assert "| tiny, all weights | " in shown
