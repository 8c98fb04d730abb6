"""The kernels to leave out on this machine, since they do not compile, are wrong or slow. Imports no jax.

They are found by a process that runs each kernel before its first use (`models.kernels.check`), and that may die or
hang in the place of the run. What it finds is kept on disk until the GPUs, their driver, jax or the kernels change.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock

from groupax.core.settings import environment as env

logger = logging.getLogger(__name__)

CHECKS, EMULATED = (f"groupax.models.kernels.check:{name}" for name in ("CHECKS", "EMULATED"))
START_S, CASE_S = 180.0, 60.0  # that the process may take to find its device, and for a case
POLL_S = 0.05
DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA_KERNELS = "cudnn", "decode_attention", "grouped_matmul"
_LIBRARIES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_SOURCES = Path(__file__).parents[1] / "models"
# Parts of faults that another time may not have.
_TRANSIENT = ("does not end within", "RESOURCE_EXHAUSTED", "out of memory")
_faults: dict[str, str] = {}
_once = threading.Lock()  # taken by the first call


def kernel_faults() -> Mapping[str, str]:
    """Returns the kernels to leave out, with the reasons."""
    return _faults


def find_kernel_faults() -> None:
    """Finds the kernels to leave out on this machine's NVIDIA GPUs, and warns of each; call it before jax is used.

    If they cannot be checked, all are left out. Further calls in a process do nothing.
    """
    is_first, platforms = _once.acquire(blocking=False), os.environ.get("JAX_PLATFORMS") or "cuda"
    if not is_first or platforms.split(",")[0] not in ("cuda", "gpu") or not (gpus := nvidia_gpus()):
        return
    try:
        found = known_findings(gpus)
    except OSError as error:
        found = [{"kernel": name, "fault": f"it could not be checked: {error}"} for name in NVIDIA_KERNELS]
    _faults.update(faults_in(found))
    for kernel, fault in _faults.items():
        logger.warning("the kernel %s is left out, the plain form takes its place (groupax doctor): %s", kernel, fault)


def faults_in(found: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the first fault of each kernel that has one."""
    faults: dict[str, str] = {}
    for each in found:
        if each["fault"]:
            faults.setdefault(each["kernel"], each["fault"])
    return faults


def nvidia_gpus() -> list[str]:
    """Returns the name and the driver's version of each GPU, "name, version"; empty if there is none, or no driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        version = DRIVER.read_text() if DRIVER.exists() else ""
        return [f"NVIDIA GPU, {found[0]}"] if (found := re.findall(r"\d+\.\d+(?:\.\d+)?", version)) else []
    return [line for line in done.stdout.strip().splitlines() if "," in line]


def known_findings(gpus: Sequence[str], refreshes: bool = False) -> list[dict[str, Any]]:
    """Returns the findings on these GPUs, from disk if they are known, unless it `refreshes` them.

    Of several processes one checks. Faults that another time may not have are not kept, nor is anything without a disk.

    Raises:
        OSError: The process that checks does not start, or finds no device.
    """
    file = cache_file(gpus)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(f"{file}.lock"))
        with contextlib.suppress(OSError, ValueError):
            if not refreshes:
                return json.loads(file.read_text(encoding="utf-8"))
        found = examined_kernels()
        if found and not any(text in each["fault"] for each in found for text in _TRANSIENT):
            with contextlib.suppress(OSError):
                file.write_text(json.dumps(found), encoding="utf-8")
        return found


def cache_file(gpus: Sequence[str]) -> Path:
    """Returns the file that keeps the findings on these GPUs with the present libraries and kernels."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    digest = hashlib.sha256(json.dumps([*gpus, visible, *versions_of(_LIBRARIES).items()]).encode())
    for path in sorted(_SOURCES.rglob("*attention*.py")) + sorted(_SOURCES.glob("kernels/*.py")):
        digest.update(path.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "groupax" / "kernels"
    return folder / f"{digest.hexdigest()[:16]}.json"


def versions_of(libraries: Sequence[str]) -> dict[str, str]:
    """Returns the versions of those that are installed."""
    found = {}
    for name in libraries:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def examined_kernels(checks: str = CHECKS, start_s: float = START_S, case_s: float = CASE_S) -> list[dict[str, Any]]:
    """Checks kernels in another process, which is started again without a kernel that it died or hung in.

    Args:
        checks: Reference of the checks.
        start_s: Longest time until it knows its device.
        case_s: Longest time of a case.

    Raises:
        OSError: The process does not start, or finds no device.
    """
    found: list[dict[str, Any]] = []
    left: list[str] | None = None
    with tempfile.TemporaryDirectory() as folder:
        while left is None or left:
            out = Path(folder, f"{len(found)}.jsonl")
            end = _run(checks, left or (), out, start_s, case_s)
            lines = [json.loads(line) for line in _lines(out)]
            if not lines:
                raise OSError(f"the process that checks kernels {end or 'found nothing'}")
            found += [line for line in lines if "fault" in line]
            if not end:
                return found
            kernels = lines[0]["kernels"]
            if not kernels:
                return found
            kernel = lines[-1].get("kernel", kernels[0])
            found.append({"kernel": kernel, "case": lines[-1].get("case", ""), "fault": f"its process {end}"})
            left = kernels[kernels.index(kernel) + 1 :]
    return found


def _run(checks: str, names: Sequence[str], out: Path, start_s: float, case_s: float) -> str:
    """Runs the process, and returns how it failed; an empty text if it did not."""
    own = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_TRACEBACK_FILTERING": "off",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    if platforms := os.environ.get("JAX_PLATFORMS"):
        own["JAX_PLATFORMS"] = platforms if "cpu" in platforms.split(",") else f"{platforms},cpu"  # of the reference
    dropped = (env.COORDINATOR, env.NUM_PROCESSES, env.PROCESS_INDEX)
    environment = {name: value for name, value in os.environ.items() if name not in dropped} | own
    command = [sys.executable, "-m", "groupax.models.kernels.check", str(out), checks, *names]
    limit_s, num_lines = start_s, 0
    deadline_s = time.monotonic() + limit_s
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=environment, stderr=errors, **streams)
        try:
            while process.poll() is None:
                if (number := len(_lines(out))) > num_lines:
                    num_lines, limit_s = number, case_s
                    deadline_s = time.monotonic() + limit_s
                if time.monotonic() > deadline_s:
                    return f"does not end within {limit_s:g} s"
                time.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        text = errors.read().decode(errors="replace").strip().splitlines()
    return f"ended with status {process.returncode}: {text[-1] if text else ''}" if process.returncode else ""


def _lines(file: Path) -> list[str]:
    """Returns the whole lines of a file that another process may be writing."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
