"""The devices to compile for, which may be absent."""

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from groupax.parallel.accelerators import (
    GPUS,
    TPUS,
    Chip,
    Gpu,
    GpuHosts,
    Slice,
    gpu_hosts,
    has_cuda_plugin,
    set_gpu_flags,
    tpu_slice,
)

# Slices whose chips have two cores that appear as one device.
_CONFIGS = {"v4": "megacore", "v5p": "megacore"}


@dataclass(frozen=True)
class Target:
    """The devices to plan for."""

    name: str  # name of the slice, kind and number of GPUs, or cpu:N
    devices: tuple[Any, ...]  # devices for a mesh
    chip: Chip | None  # kind of the devices; None for CPUs, whose limits are unknown


def prepare(name: str, libtpu: Path = Path("build/libtpu"), cuda: Path = Path("build/cuda")) -> None:
    """Sets the environment variables that jax reads when it is imported, which has to follow.

    Args:
        name: Name of the target, see `find_target`.
        libtpu: Folder that libtpu was installed into, if it is not installed with jax.
        cuda: Folder that jax's CUDA plugin was installed into, if it is not installed with jax.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    # programs for absent devices cannot be read back, and compilation is timed
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if cpus := _num_cpus(name):
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={cpus}".strip()
    elif isinstance(absent_devices(name), GpuHosts):
        _prepare_cuda(cuda)
    else:
        _prepare_libtpu(absent_devices(name).name, libtpu)


def _prepare_libtpu(slice_name: str, folder: Path) -> None:
    # leave this machine's chips alone, which others may use; libtpu complains when no slice is given
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": slice_name,
    }
    if "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu"):
        return
    library = folder.resolve() / "libtpu" / "libtpu.so"
    if not library.is_file():
        raise ValueError(
            f"compiling for TPUs needs libtpu, and there is no {library}; get it with pip install --no-deps --target "
            f"{folder} libtpu (in a separate folder, because jax looks for a TPU wherever libtpu is installed)"
        )
    os.environ["TPU_LIBRARY_PATH"] = str(library)
    sys.path.insert(0, str(folder.resolve()))


def _prepare_cuda(folder: Path) -> None:
    # leave this machine's GPUs alone, which others may use; the plugin complains that it finds no driver
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3")}
    set_gpu_flags()
    if has_cuda_plugin():
        return
    if not (folder / "jax_plugins").is_dir():
        raise ValueError(
            f"compiling for NVIDIA GPUs needs jax's CUDA plugin, which needs neither a GPU nor a driver, and there is "
            f"none in {folder}; get it with pip install 'groupax[cuda13]', or in a separate folder (1.4 GB) "
            f"with pip install --no-deps --target {folder} jax-cuda13-plugin=={version('jax')} "
            f"jax-cuda13-pjrt=={version('jax')} nvidia-cudnn-cu13"
        )
    sys.path.insert(0, str(folder.resolve()))


def find_target(name: str) -> Target:
    """Returns the devices of a name.

    Args:
        name: A TPU slice, e.g. v4-64 or v5e-32, a kind and number of GPUs, e.g. h100-8, or a number of virtual CPU
            devices, e.g. cpu:8.
    """
    import jax

    if cpus := _num_cpus(name):
        devices = jax.devices("cpu")
        if len(devices) != cpus:
            raise ValueError(f"{name} was requested, but jax was started with {len(devices)} CPU devices")
        return Target(name, tuple(devices), None)
    from jax.experimental import topologies

    requested = absent_devices(name)
    try:
        if isinstance(requested, GpuHosts):
            text = f"{requested.num_hosts}x1x{requested.gpus_per_host}"
            config = target_config(requested.chip)
            topology = topologies.get_topology_desc(platform="cuda", topology=text, target_config=config)
        else:
            text = f"{requested.kind}:{'x'.join(map(str, requested.sides))}"
            topology = topologies.get_topology_desc(text, platform="tpu", **_slice_settings(requested))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"XLA does not know {requested.name} ({text}): {error}") from error
    chip = requested.chip if isinstance(requested, GpuHosts) else TPUS[requested.kind]
    return Target(requested.name, tuple(topology.devices), chip)


def target_config(gpu: Gpu) -> str:
    """Returns XLA's text of a GPU, a GpuTargetConfigProto: that of its architecture with the GPU's own figures."""
    text = files("groupax.satellites.planning").joinpath("gpu_targets", f"{gpu.architecture}.txtpb").read_text()
    figures = {
        "name": f'"{gpu.kinds[0]}"',
        "core_count": gpu.num_cores,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": int(gpu.device_bytes),
        "memory_bandwidth": int(gpu.memory_bytes_per_s),
        "l2_cache_size": gpu.l2_bytes,
    }
    for name, figure in figures.items():
        text = re.sub(rf"^  {name}: .*$", f"  {name}: {figure}", text, flags=re.MULTILINE)
    return re.sub(
        r"^device_description_str: .*$", f"device_description_str: {figures['name']}", text, flags=re.MULTILINE
    )


def _slice_settings(requested: Slice) -> dict[str, Any]:
    settings: dict[str, Any] = {"chip_config_name": _CONFIGS[requested.kind]} if requested.kind in _CONFIGS else {}
    if requested.num_chips < 4:  # a fraction of a host
        settings["chips_per_host_bounds"] = (*requested.sides, 1)
    return settings


def absent_devices(name: str) -> Slice | GpuHosts:
    """Returns the TPU slice or the GPUs of a name."""
    words = name.strip().lower()
    if re.match(r"(tpu[ -])?v\d[a-z]*-", words):
        return tpu_slice(words)
    try:
        return gpu_hosts(words)
    except ValueError as error:
        if words.startswith(tuple(GPUS)):
            raise
        raise ValueError(f"{error}; TPU slices are e.g. {', '.join(TPUS)}-8; virtual CPU devices are cpu:8") from None


def _num_cpus(name: str) -> int:
    match = re.fullmatch(r"cpu:([1-9]\d*)", name.strip().lower())
    return int(match[1]) if match else 0
