"""jax on this machine: its settings, which must precede its first use, and the programs that it compiles."""

import ctypes
import functools
import logging
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import jax
from jax import monitoring

from groupax.core.errors import RunError
from groupax.parallel.accelerators import GPU_MEMORY_FRAC, has_cuda_plugin, set_gpu_flags
from groupax.parallel.kernels import find_kernel_faults
from groupax.parallel.memory import keep_freed_memory
from groupax.parallel.processes import join

logger = logging.getLogger(__name__)


def traced_platform() -> str:
    """Returns the platform of the mesh whose program is being traced: "cpu", "gpu" or "tpu".

    Inside a `shard_map` this is the platform of its mesh, even where the devices are absent and the program is only
    compiled for them. Elsewhere it is jax's default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def cuda_capability(device: Any) -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA GPU or of a description of one; None for other devices."""
    capability = getattr(device, "compute_capability", "")
    if device.platform not in ("gpu", "cuda") or not capability.replace(".", "").isdigit():
        return None
    major, minor = capability.split(".")
    return int(major), int(minor)


REQUESTED = "/jax/compilation_cache/compile_requests_use_cache"
COMPILED = "/jax/core/compile/backend_compile_duration"
STAGES = {COMPILED, "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration"}
# The functions that run all layers of a model or update all weights, whose compilation takes seconds.
LARGE_PROGRAMS = ("admit", "decode_chunk", "micro_step", "score", "apply_update")
CACHE_READ_S = 0.5  # reading a program back from the cache takes less
MAX_NESTED_STAGES = 1000  # traced functions within one function


class Compilation:
    """The programs that this process traces and compiles, in any thread, or reads back from the cache on disk.

    Attributes:
        seconds: Time spent so far.
        num_programs: Number of programs so far.
        num_large_programs: Number of those that run the model's layers or update its weights.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_programs = self.num_large_programs = 0
        self._requested_s: dict[int, float] = {}  # by thread
        self._stages: dict[int, deque[tuple[float, float]]] = {}  # by thread: start and seconds, without nested ones
        monitoring.register_event_listener(self._on_event)
        monitoring.register_event_duration_secs_listener(self._on_duration)

    @property
    def is_under_way(self) -> bool:
        """True while a program is being compiled, and not just read back from the cache."""
        now_s = time.monotonic()
        return any(now_s - requested_s > CACHE_READ_S for requested_s in self._requested_s.copy().values())

    def _on_event(self, event: str, **_: object) -> None:
        if event == REQUESTED:
            self._requested_s[threading.get_ident()] = time.monotonic()

    def _on_duration(self, event: str, duration_secs: float, **kwargs: object) -> None:
        thread = threading.get_ident()
        if event == COMPILED:
            self._requested_s.pop(thread, None)
            name = str(kwargs.get("fun_name")).removeprefix("jit(").removesuffix(")")
            self.num_programs += 1
            if name in LARGE_PROGRAMS:
                self.num_large_programs += 1
                return_freed_memory()
        if event in STAGES:
            start_s = time.monotonic() - duration_secs
            stages = self._stages.setdefault(thread, deque(maxlen=MAX_NESTED_STAGES))
            while stages and stages[-1][0] >= start_s:  # a function that was traced within this one
                self.seconds -= stages.pop()[1]
            stages.append((start_s, duration_secs))
            self.seconds += duration_secs


def return_freed_memory() -> None:
    """Gives the system back what malloc keeps of freed memory; a compiler leaves hundreds of megabytes of it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


@functools.cache
def compilation() -> Compilation:
    """Returns the one record of this process."""
    return Compilation()


# Variables with which users choose the part of a GPU's memory that jax takes; the second is the older name.
_GPU_MEMORY = frozenset({"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"})


def configure_jax() -> None:
    """Sets up virtual CPU devices, memory reuse, compilation, and the connection to the run's processes.

    Settings that the user made are kept. On GPUs, kernels are checked that have not been before.

    Raises:
        RunError: jax finds no device of the platform that the user chose.
    """
    keep_freed_memory()
    _use_all_cores()
    if has_cuda_plugin():
        _use_most_of_a_gpu()
        set_gpu_flags()
        find_kernel_faults()
    _keep_compiled_programs()
    join()
    _find_devices()


def _find_devices() -> None:
    """Has jax find its devices, so that an error comes before any work and says what to install."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion without text if it finds no GPU
        chosen = str(jax.config.jax_platforms or "")  # pyright: ignore[reportAttributeAccessIssue]
        reason = next(iter(str(error).splitlines()), "it finds no such device")
        reason = reason.partition(" (set JAX_PLATFORMS")[0].rstrip(".")
        gpu = "see nvidia-smi for the GPU and its driver" if has_cuda_plugin() else "pip install 'groupax[cuda13]'"
        remedies = {"cuda": gpu, "gpu": gpu, "tpu": "pip install 'groupax[tpu]'"}
        remedy = "".join(f"; for {name}: {text}" for name, text in remedies.items() if name in chosen.split(","))
        unset = f"JAX_PLATFORMS is {chosen!r} (unset it to use the devices that there are), and " if chosen else ""
        raise RunError(f"{unset}jax cannot start: {reason}{remedy}") from error


def _use_most_of_a_gpu() -> None:
    """Lets programs have more of a GPU's memory than the 75% that jax takes by default."""
    if not _GPU_MEMORY & os.environ.keys():
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(GPU_MEMORY_FRAC)


def _use_all_cores() -> None:
    """Creates one CPU device per core, since a device uses a single core inside a jitted loop."""
    chosen = jax.config.jax_num_cpu_devices > 0  # pyright: ignore[reportAttributeAccessIssue]
    if chosen or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        jax.config.update("jax_num_cpu_devices", cores)
    except RuntimeError:  # jax's backends are up already
        if jax.default_backend() == "cpu" and jax.device_count() < cores:
            logger.warning(
                "jax was used before groupax and runs on %d of %d cores; create the trainer or engine first, or set "
                "jax_num_cpu_devices",
                jax.device_count(),
                cores,
            )


def _keep_compiled_programs() -> None:
    """Keeps compiled programs, small ones included, on disk for the next run with the same shapes."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "groupax" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(cache))
    if jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # jax's own default
