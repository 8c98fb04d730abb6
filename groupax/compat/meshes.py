"""What other libraries say of how a model is split over devices, as our mesh."""

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
    """The mesh that these settings of transformers' arguments ask for; None if none splits anything.

    Args:
        deepspeed: a configuration, or its file.
        fsdp: True, or names of options.
        parallelism_config: accelerate's, with sizes of its own.
    """
    if parallelism_config:
        sizes = {name: int(getattr(parallelism_config, f"{name}_size", None) or 1) for name in _AXES}
        return ",".join(map(str, (sizes["dp_replicate"], sizes["dp_shard"], 1, sizes["tp"], sizes["cp"] * sizes["sp"])))
    if deepspeed and zero_stage(deepspeed) != 0:
        return SPLIT
    options = fsdp.split() if isinstance(fsdp, str) else [] if isinstance(fsdp, bool) else list(fsdp or [])
    names = [str(getattr(option, "value", option)) for option in options]
    return SPLIT if fsdp and "no_shard" not in names else None


def zero_stage(deepspeed: Any) -> int | None:
    """The stage of ZeRO in a configuration or its file; None if it names none.

    Raises:
        ValueError: there is no such file, or it is no JSON.
    """
    if isinstance(deepspeed, (str, Path)):
        try:
            deepspeed = json.loads(Path(deepspeed).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"deepspeed={str(deepspeed)!r} cannot be read: {error}") from error
    stage = dict(deepspeed).get("zero_optimization", {}) if isinstance(deepspeed, Mapping) else {}
    return stage.get("stage")


def tell_whole(model: Model, setting: str) -> None:
    """Say which dims stay whole because they do not divide by the mesh that a setting asked for."""
    for dim, size, axis in indivisible(split_dims(model.config), model.mesh):
        tell(
            f"{setting}: {dim} ({size}) does not divide by {axis}={model.mesh.shape[axis]}; it stays whole on every "
            "device"
        )
