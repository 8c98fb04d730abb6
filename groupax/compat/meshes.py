"""Meshes from other libraries' settings of parallelism."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupax.compat.fields import tell
from groupax.models.checkpoint import Model
from groupax.models.specs import split_dims
from groupax.parallel.mesh import indivisible

# Weights, gradients and the optimizer's state split over all devices, as ZeRO's third stage and FSDP do.
SPLIT = "1,-1,1,1,1"
# The sizes of accelerate's `ParallelismConfig`.
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


def mesh_of(deepspeed: Any, fsdp: Any, parallelism_config: Any) -> str | None:
    """Returns the mesh that these of transformers' arguments ask for; None if none of them shards anything.

    Args:
        deepspeed: A configuration, or its file.
        fsdp: True, or names of options.
        parallelism_config: Accelerate's configuration with the sizes of its axes.
    """
    if parallelism_config:
        sizes = {name: int(getattr(parallelism_config, f"{name}_size", None) or 1) for name in _AXES}
        return ",".join(map(str, (sizes["dp_replicate"], sizes["dp_shard"], 1, sizes["tp"], sizes["cp"] * sizes["sp"])))
    if deepspeed and zero_stage(deepspeed) != 0:
        return SPLIT
    return SPLIT if fsdp and "no_shard" not in _options(fsdp) else None


def zero_stage(deepspeed: Any) -> int | None:
    """Returns the stage of ZeRO in a configuration or its file; None if it names none.

    Raises:
        ValueError: The file does not exist or is not JSON.
    """
    return _zero(deepspeed).get("stage")


def offloaded(deepspeed: Any, fsdp: Any) -> tuple[bool, bool]:
    """Returns whether these of transformers' arguments offload the optimizer state, and whether weights, to the hosts.

    Args:
        deepspeed: A configuration, or its file.
        fsdp: True, or names of options.
    """
    devices = (dict(_zero(deepspeed).get(f"offload_{what}") or {}).get("device") for what in ("optimizer", "param"))
    of_optimizer, of_weights = (device not in (None, "none") for device in devices)
    both = "offload" in _options(fsdp)
    return of_optimizer or both, of_weights or both


def _zero(deepspeed: Any) -> Mapping[str, Any]:
    if isinstance(deepspeed, (str, Path)):
        try:
            deepspeed = json.loads(Path(deepspeed).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"deepspeed={str(deepspeed)!r} cannot be read: {error}") from error
    return dict(deepspeed).get("zero_optimization", {}) if isinstance(deepspeed, Mapping) else {}


def _options(fsdp: Any) -> list[str]:
    options = fsdp.split() if isinstance(fsdp, str) else [] if isinstance(fsdp, bool) else list(fsdp or [])
    return [str(getattr(option, "value", option)) for option in options]


def tell_whole(model: Model, setting: str) -> None:
    """Warns of dims that are replicated because the requested mesh does not divide them."""
    for dim, size, axis in indivisible(split_dims(model.config), model.mesh):
        tell(
            f"{setting}: {dim} ({size}) is not divisible by {axis}={model.mesh.shape[axis]}; it stays whole on every "
            "device"
        )
