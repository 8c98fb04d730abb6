"""Settings of jax itself, which must precede its first use."""

import logging
import os
from pathlib import Path

import jax

from groupax.errors import RunError
from groupax.parallel.accelerators import GPU_MEMORY_FRAC
from groupax.parallel.host_memory import keep_freed_memory
from groupax.parallel.processes import join
from groupax.parallel.xla_flags import has_cuda_plugin, set_gpu_flags

logger = logging.getLogger(__name__)

# Variables with which users choose the part of a GPU's memory that jax takes; the second is the older name.
_GPU_MEMORY = frozenset({"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"})


def configure_jax() -> None:
    """Sets up virtual CPU devices, memory reuse, compilation, and the connection to the run's processes.

    Settings that the user made are kept.

    Raises:
        RunError: jax finds no device of the platform that the user chose.
    """
    keep_freed_memory()
    _use_all_cores()
    if has_cuda_plugin():
        _use_most_of_a_gpu()
        set_gpu_flags()
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
        gpu = "see nvidia-smi for the GPU and its driver" if has_cuda_plugin() else "pip install 'groupax[cuda]'"
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
