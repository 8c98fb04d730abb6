"""Flags of XLA's compiler for NVIDIA GPUs. XLA reads them once, when jax compiles for the first time."""

import importlib.util
import logging
import os

from jaxlib import version

logger = logging.getLogger(__name__)

CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# Only flags whose effect was seen in compiled programs. With matrices that are sharded over fsdp, the threshold makes
# one reduce-scatter of a layer's gradients, sent while the next layer's are computed. Otherwise there are
# several, some of which are waited for.
GPU_FLAGS = {"xla_gpu_reduce_scatter_combine_threshold_bytes": "134217728"}
# XLA ends the process at a flag that it does not know, and flags come and go with its versions.
_JAXLIBS_WITH_FLAGS = ("0.10.",)


def has_cuda_plugin() -> bool:
    """Checks whether jax's plugin for NVIDIA GPUs is installed."""
    return any(map(_is_installed, CUDA_PLUGINS))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False


def set_gpu_flags() -> None:
    """Adds the flags to the environment variable XLA_FLAGS, except for those that it has already.

    A variable that names a file of flags is left as it is.
    """
    if not version.__version__.startswith(_JAXLIBS_WITH_FLAGS):
        logger.info("jaxlib %s may not know groupax's flags for GPUs, so they are not set", version.__version__)
        return
    flags = os.environ.get("XLA_FLAGS", "").split()
    if flags and not flags[0].startswith("--"):
        return
    names = {flag.removeprefix("--").partition("=")[0] for flag in flags}
    added = [f"--{name}={value}" for name, value in GPU_FLAGS.items() if name not in names]
    os.environ["XLA_FLAGS"] = " ".join([*flags, *added])
