"""The translation of other libraries' sharding settings to a mesh."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupax.compat.fields import warn
from groupax.models.params import split_dims
from groupax.models.weights.checkpoint import Model
from groupax.parallel.mesh import indivisible

# Shards weights, gradients and optimizer state over all devices, like ZeRO stage 3 and FSDP.
FULLY_SHARDED = "1,-1,1,1,1"
# Axes of accelerate's `ParallelismConfig`, whose fields are named `<axis>_size`.
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


def requested_mesh(deepspeed: Any, fsdp: Any, parallelism_config: Any) -> str | None:
    """Returns the mesh that settings of transformers' `TrainingArguments` request; None if they shard nothing.

    Args:
        deepspeed: DeepSpeed configuration, or the path of its file.
        fsdp: True, or the names of FSDP options.
        parallelism_config: Axis sizes in accelerate's `ParallelismConfig`.
    """
    if parallelism_config:
        sizes = {name: int(getattr(parallelism_config, f"{name}_size", None) or 1) for name in _AXES}
        return ",".join(map(str, (sizes["dp_replicate"], sizes["dp_shard"], 1, sizes["tp"], sizes["cp"] * sizes["sp"])))
    if deepspeed and zero_stage(deepspeed) != 0:
        return FULLY_SHARDED
    return FULLY_SHARDED if fsdp and "no_shard" not in _options(fsdp) else None


def zero_stage(deepspeed: Any) -> int | None:
    """Returns the ZeRO stage of a DeepSpeed configuration or its file; None if it has none.

    Raises:
        ValueError: The file does not exist or is not JSON.
    """
    return _zero(deepspeed).get("stage")


def requested_offload(deepspeed: Any, fsdp: Any) -> tuple[bool, bool]:
    """Returns whether settings of transformers' `TrainingArguments` offload optimizer state, and weights, to the host.

    Args:
        deepspeed: DeepSpeed configuration, or the path of its file.
        fsdp: True, or the names of FSDP options.
    """
    devices = (dict(_zero(deepspeed).get(f"offload_{what}") or {}).get("device") for what in ("optimizer", "param"))
    optimizer, weights = (device not in (None, "none") for device in devices)
    both = "offload" in _options(fsdp)
    return optimizer or both, weights or both


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


def warn_replicated(model: Model, setting: str) -> None:
    """Warns about dims that stay replicated because the requested mesh does not divide them."""
    for dim, size, axis in indivisible(split_dims(model.config), model.mesh):
        warn(
            f"{setting}: {dim} ({size}) is not divisible by {axis}={model.mesh.shape[axis]}; it stays replicated on "
            "every device"
        )
