"""The weights that a run does not train: the base of an adapter, and the part that sees images."""

from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from groupax.models.adapted import FrozenBase
from groupax.models.specs import Params
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.quantize import cast_unquantized, is_quantized
from groupax.parallel.mesh import format_mesh
from groupax.settings.compute import VisionSettings


def untrained_weights(model: Model, settings: VisionSettings) -> Params:
    """Returns the weights that a run without an adapter leaves as they are."""
    if model.adapter is not None or not settings.freeze_vision_tower or "vision" not in model.params:
        return {}
    return {"vision": model.params["vision"]}


def frozen_base(model: Model, untrained: Params, dtype: Any) -> FrozenBase | None:
    """Returns what trained weights are applied to, in compute dtype; None if all weights are trained.

    Args:
        model: Model that is trained, or whose adapter is.
        untrained: Weights of a model without an adapter that are not trained.
        dtype: Compute dtype.

    Raises:
        ValueError: The model is quantized and has no adapter.
    """
    if model.adapter is not None:
        return FrozenBase(cast_unquantized(model.adapter.frozen.params, dtype), model.adapter.frozen.scale)
    if is_quantized(model.params):
        raise ValueError("the weights are quantized and cannot be trained; train an adapter: set lora_r, e.g. to 16")
    return FrozenBase(cast_unquantized(untrained, dtype), jnp.float32(1.0)) if untrained else None


def check_dropout(rate: float, mesh: Mesh) -> None:
    """Checks that an adapter's dropout is built for the mesh.

    Raises:
        ValueError: It is not.
    """
    if rate and mesh.shape["tp"] > 1:
        raise ValueError(
            f"mesh {format_mesh(mesh)}: lora_dropout {rate} is not built for inputs that are split over tp; set it to "
            "0, or tp to 1"
        )
