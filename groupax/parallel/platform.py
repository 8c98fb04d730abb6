"""The platform that a program is traced for, which may differ from that of the machine that traces it."""

from typing import Any

import jax


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
