"""The findings of `groupax doctor`: what this machine has, whether it fits together, and how fast it is.

Whatever touches a device runs in a process of its own, with a limit of time: the kernels (`parallel.kernels`), the
peaks (this module as a program), and a small model's first steps.
"""

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.core.errors import RunError
from groupax.parallel.accelerators import processor_name
from groupax.parallel.kernels import CHECKS, EMULATED, examined_kernels, known_findings, nvidia_gpus, versions_of
from groupax.rewards.sandbox import check_sandbox

LIMIT_S = 300.0  # of a part, with compilation
PORTS = {8000: "groupax serve", 8265: "groupax view"}
MIN_DISK, MIN_MEMORY = 5e9, 4e9  # bytes
# Oldest driver of each CUDA version, from the table of CUDA's release notes.
DRIVERS = {"cuda13": 580, "cuda12": 525}
_LIBRARIES = ("groupax", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "transformers", "numpy")


@dataclass(frozen=True)
class Row:
    """A finding: what it is about, what was found, and what to do if that is a problem."""

    name: str
    found: str
    remedy: str = ""


def software() -> Iterator[Row]:
    """Yields the versions, and whether jax's plugin, the driver and the GPUs fit."""
    found = versions_of(_LIBRARIES)
    yield Row("Python", f"{platform.python_version()}, {', '.join(f'{name} {each}' for name, each in found.items())}")
    yield gpu_row(nvidia_gpus(), [name for name in DRIVERS if f"jax-{name}-plugin" in found])


def gpu_row(gpus: Sequence[str], plugins: Sequence[str]) -> Row:
    """Returns whether GPUs, given as "name, driver", and jax's plugins fit, and the command to install what does."""
    if not gpus:
        remedy = "nvidia-smi does not answer: install NVIDIA's driver, or leave the plugin out" if plugins else ""
        return Row("NVIDIA GPUs", f"none{f', but jax has the plugin of {plugins[0]}' if plugins else ''}", remedy)
    name, _, driver = (part.strip() for part in gpus[0].rpartition(","))
    major = int(driver.partition(".")[0]) if driver.partition(".")[0].isdigit() else 0
    fitting = [plugin for plugin, oldest in DRIVERS.items() if major >= oldest]
    found = f"{len(gpus)} x {name}, driver {driver}"
    if not fitting:
        return Row("NVIDIA GPUs", found, f"the driver is too old: CUDA 12 needs {DRIVERS['cuda12']} or newer")
    if not plugins:
        return Row("NVIDIA GPUs", f"{found}, without jax's plugin", f"pip install 'groupax[{fitting[0]}]'")
    if plugins[0] not in fitting:
        remedy = f"pip uninstall jax-{plugins[0]}-plugin jax-{plugins[0]}-pjrt; pip install 'groupax[{fitting[0]}]'"
        return Row("NVIDIA GPUs", f"{found}, too old for {plugins[0]}", f"a newer driver, or {remedy}")
    return Row("NVIDIA GPUs", f"{found}, {plugins[0]}")


def machine() -> Iterator[Row]:
    """Yields the processor, memory, disk, sandbox and ports."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Row("processor", f"{cores} cores of {processor_name()}")
    with suppress(OSError):  # without Linux's /proc
        free = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
        yield Row("free memory", f"{free / 1e9:.1f} GB", "" if free >= MIN_MEMORY else "close other programs")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    for name, folder in {"free disk here": Path.cwd(), "of the cache": cache}.items():
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        left = shutil.disk_usage(existing).free
        yield Row(name, f"{left / 1e9:.0f} GB", "" if left >= MIN_DISK else "checkpoints and models need more")
    yield sandbox()
    taken = [f"{port} ({name})" for port, name in PORTS.items() if not _is_free(port)]
    remedy = "give these commands another --port" if taken else ""
    yield Row("ports", f"taken: {', '.join(taken)}" if taken else f"{', '.join(map(str, PORTS))} are free", remedy)


def sandbox() -> Row:
    """Returns whether untrusted code can be isolated."""
    if shutil.which("bwrap") is None:
        return Row("sandbox", "no bubblewrap, which only rewards and tools that run code need")
    try:
        check_sandbox()
    except RunError as error:
        return Row("sandbox", "bubblewrap fails", f"only rewards and tools that run code need it: {error}")
    return Row("sandbox", "bubblewrap works")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def kernels(is_emulated: bool) -> tuple[list[Row], list[dict[str, Any]]]:
    """Returns the findings on each kernel as rows, and as numbers."""
    gpus = nvidia_gpus()
    try:
        if gpus and not is_emulated:
            found = known_findings(gpus, refreshes=True)  # for the runs that follow
        else:
            found = examined_kernels(EMULATED if is_emulated else CHECKS)
    except OSError as error:
        return [Row("kernels", "not checked", str(error))], []
    if not found:
        return [Row("kernels", "none for this device, the plain forms are used")], found
    rows = []
    for each in found:
        text = f"error {each['error']:.1e} (plain form {each['plain_error']:.1e})" if "error" in each else ""
        if each.get("ms"):
            text += f", {each['ms']:.3g} ms (plain form {each['plain_ms']:.3g} ms)"
        remedy = each["fault"] and f"{each['fault']}{'; runs leave it out' if gpus and not is_emulated else ''}"
        rows.append(Row(f"{each['kernel']}: {each['case']}", text, remedy))
    return rows, found


def peaks() -> tuple[list[Row], dict[str, Any]]:
    """Returns the devices that jax finds, and their measured peaks."""
    out, fault = _output([sys.executable, "-m", "groupax.satellites.doctor"])
    try:
        numbers = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return [Row("devices", "not measured", fault or out[-300:])], {}
    memory = f", {numbers['memory_bytes'] / 1e9:.1f} GB each" if numbers["memory_bytes"] else ""
    speed = ", ".join(f"{flops / 1e9:,.0f} GFLOP/s in {name}" for name, flops in numbers["flops"].items())
    return [
        Row("devices", f"{numbers['num_devices']} x {numbers['device_kind']}{memory}"),
        Row("measured", f"{speed}, {numbers['bytes_per_s'] / 1e9:.4g} GB/s"),
    ], numbers


def training() -> tuple[list[Row], dict[str, Any]]:
    """Returns how three steps of a small model ended."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "groupax", "train", "--recipe", "arithmetic", "--max_steps", "3"]
        flags = ["--prompts_per_step", "2", "--progress_bar", "none", "--output_dir", f"{folder}/run"]
        rows = Path(folder, "rows.jsonl")
        rows.write_text("".join(f'{{"prompt": "{n}+{n}=", "answer": "{2 * n}"}}\n' for n in range(8)))
        started_s = time.perf_counter()
        out, fault = _output([*command, *flags, "--dataset", str(rows), "--eval_dataset", str(rows)])
        seconds = time.perf_counter() - started_s
        if fault:
            return [Row("three steps", "failed", f"{fault} {out[-300:]}".strip())], {"fault": fault}
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        steps = [each for each in map(json.loads, lines) if "reward" in each]
    times = ", ".join(f"{each['step_time']:.2g}" for each in steps)
    gap = max(each["rollout/logp_diff_max"] for each in steps)
    found = f"a small model trains: steps of {times} s, {seconds:.0f} s in all, engine and trainer differ by {gap:.1e}"
    return [Row("three steps", found)], {"seconds": seconds, "step_seconds": [each["step_time"] for each in steps]}


def _output(command: Sequence[str]) -> tuple[str, str]:
    """Returns what a program prints, and how it failed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return "", f"no end within {LIMIT_S:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        texts = []
        for stream in (out, errors):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace").strip())
    return texts[0], (texts[1][-600:] or f"ended with status {status}") if status else ""


def measured() -> Mapping[str, Any]:
    """Measures the first device: matmuls and memory bandwidth. Prints nothing, imports jax."""
    import jax
    import jax.numpy as jnp

    from groupax.parallel.runtime import configure_jax

    configure_jax()
    device = jax.devices()[0]
    is_cpu, stats = device.platform == "cpu", device.memory_stats() or {}
    size = 1024 if is_cpu else 8192

    def seconds(function: Any, x: Any) -> float:
        program, best = jax.jit(function), float("inf")
        for _ in range(4):  # the first one compiles
            started_s = time.perf_counter()
            jax.block_until_ready(program(x))
            best = min(best, time.perf_counter() - started_s)
        return best

    flops = {}
    for dtype in ("float32", "bfloat16"):
        x = jnp.ones((size, size), dtype)
        flops[dtype] = 2.0 * size**3 / seconds(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32), x)
    x = jnp.ones((1 << 26 if is_cpu else 1 << 29,), jnp.float32)
    return {
        "device_kind": device.device_kind if not is_cpu else f"cpu ({processor_name()})",
        "num_devices": jax.device_count(),
        "memory_bytes": stats.get("bytes_limit", 0),
        "flops": flops,
        "bytes_per_s": 2.0 * x.nbytes / seconds(lambda x: x + 1, x),
    }


if __name__ == "__main__":
    print(json.dumps(measured()))
