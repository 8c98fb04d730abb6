"""Devices to compile for, which need not be here."""

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.parallel.accelerators import CHIPS, Chip, Slice, tpu_slice

# Slices whose chips have two cores that programs see as one device.
_CONFIGS = {"v4": "megacore", "v5p": "megacore"}


@dataclass(frozen=True)
class Target:
    """What is planned for.

    Attributes:
        name: as it was asked for.
        devices: for a mesh.
        chip: what each of them is; None for a CPU, of which nothing is known beforehand.
    """

    name: str
    devices: tuple[Any, ...]
    chip: Chip | None


def prepare(name: str, libtpu: Path) -> None:
    """Set what jax reads when it is imported; call this before.

    Args:
        name: see `target_of`.
        libtpu: the folder that libtpu was installed into, where it is not installed beside jax.

    Raises:
        ValueError: there is no such target, or no libtpu.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    # programs for devices that are not here cannot be read back, and times are those of compiling
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if cpus := _num_cpus(name):
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={cpus}".strip()
        return
    # no chips of the machine that this runs on are used, whoever else has them; libtpu complains if told of no slice
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
            f"to compile for TPUs takes libtpu, and there is no {library}; get it with pip install --no-deps --target "
            f"{libtpu} libtpu (in a folder of its own, because where it is installed every jax process looks for a TPU)"
        )
    os.environ["TPU_LIBRARY_PATH"] = str(library)
    sys.path.insert(0, str(libtpu.resolve()))


def target_of(name: str) -> Target:
    """The devices of a TPU slice, as v4-64 or v5e-32, or so many virtual ones of a CPU, as cpu:8.

    Raises:
        ValueError: there is no such slice, or XLA does not know it.
    """
    import jax

    if cpus := _num_cpus(name):
        devices = jax.devices("cpu")
        if len(devices) != cpus:
            raise ValueError(f"{name} was asked for, and jax has been started with {len(devices)} CPU devices")
        return Target(name, tuple(devices), None)
    from jax.experimental import topologies

    wanted = _slice(name)
    text = f"{wanted.kind}:{'x'.join(map(str, wanted.sides))}"
    settings: dict[str, Any] = {"chip_config_name": _CONFIGS[wanted.kind]} if wanted.kind in _CONFIGS else {}
    if wanted.num_chips < 4:  # parts of a host
        settings["chips_per_host_bounds"] = (*wanted.sides, 1)
    try:
        topology = topologies.get_topology_desc(text, platform="tpu", **settings)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"libtpu does not know the slice {wanted.name} ({text}): {error}") from error
    return Target(wanted.name, tuple(topology.devices), CHIPS[wanted.kind])


def _slice(name: str) -> Slice:
    try:
        return tpu_slice(name)
    except ValueError as error:
        raise ValueError(f"{error}; virtual CPU devices are cpu:8") from None


def _num_cpus(name: str) -> int:
    match = re.fullmatch(r"cpu:([1-9]\d*)", name.strip().lower())
    return int(match[1]) if match else 0
