"""The devices to compile for, which may be absent."""

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.parallel.accelerators import CHIPS, Chip, Slice, tpu_slice

# Slices whose chips have two cores that appear as one device.
_CONFIGS = {"v4": "megacore", "v5p": "megacore"}


@dataclass(frozen=True)
class Target:
    """The devices to plan for.

    Attributes:
        name: Name of the slice, or cpu:N.
        devices: Devices for a mesh.
        chip: Kind of the devices; None for CPUs, whose limits are unknown.
    """

    name: str
    devices: tuple[Any, ...]
    chip: Chip | None


def prepare(name: str, libtpu: Path) -> None:
    """Sets the environment variables that jax reads when it is imported, which has to follow.

    Args:
        name: Name of the target, see `find_target`.
        libtpu: Folder that libtpu was installed into, if it is not installed with jax.

    Raises:
        ValueError: There is no such target, or no libtpu.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    # programs for absent devices cannot be read back, and compilation is timed
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if cpus := _num_cpus(name):
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={cpus}".strip()
        return
    # leave this machine's chips alone, which others may use; libtpu complains when no slice is given
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": _slice(name).name,
    }
    if "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu"):
        return
    library = libtpu.resolve() / "libtpu" / "libtpu.so"
    if not library.is_file():
        raise ValueError(
            f"compiling for TPUs needs libtpu, and there is no {library}; get it with pip install --no-deps --target "
            f"{libtpu} libtpu (in a separate folder, because jax looks for a TPU wherever libtpu is installed)"
        )
    os.environ["TPU_LIBRARY_PATH"] = str(library)
    sys.path.insert(0, str(libtpu.resolve()))


def find_target(name: str) -> Target:
    """Returns the devices of a TPU slice, e.g. v4-64 or v5e-32, or virtual CPU devices, e.g. cpu:8.

    Raises:
        ValueError: There is no such slice, or XLA does not know it.
    """
    import jax

    if cpus := _num_cpus(name):
        devices = jax.devices("cpu")
        if len(devices) != cpus:
            raise ValueError(f"{name} was requested, but jax was started with {len(devices)} CPU devices")
        return Target(name, tuple(devices), None)
    from jax.experimental import topologies

    requested = _slice(name)
    text = f"{requested.kind}:{'x'.join(map(str, requested.sides))}"
    settings: dict[str, Any] = {"chip_config_name": _CONFIGS[requested.kind]} if requested.kind in _CONFIGS else {}
    if requested.num_chips < 4:  # a fraction of a host
        settings["chips_per_host_bounds"] = (*requested.sides, 1)
    try:
        topology = topologies.get_topology_desc(text, platform="tpu", **settings)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"libtpu does not know the slice {requested.name} ({text}): {error}") from error
    return Target(requested.name, tuple(topology.devices), CHIPS[requested.kind])


def _slice(name: str) -> Slice:
    try:
        return tpu_slice(name)
    except ValueError as error:
        raise ValueError(f"{error}; virtual CPU devices are cpu:8") from None


def _num_cpus(name: str) -> int:
    match = re.fullmatch(r"cpu:([1-9]\d*)", name.strip().lower())
    return int(match[1]) if match else 0
