"""The program that encodes the images of a run's prompts."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from groupax.models.vision.tower import ImageBatch, bucket, encode_images
from groupax.planning.abstract import AbstractModel, struct_with
from groupax.planning.programs import Program

_encode = jax.jit(encode_images, static_argnums=0)


@dataclass(frozen=True)
class PlannedImages:
    """The images of each prompt of a run.

    Attributes:
        num: Their number; 0 for prompts of text.
        tokens: Number of tokens that stand for each, which are part of the prompt.
    """

    num: int = 0
    tokens: int = 256


NO_IMAGES = PlannedImages()


def trace_encoding(model_state: AbstractModel, images: PlannedImages, num_prompts: int) -> list[Program]:
    """Returns the program that encodes an image of a frozen tower, once for all passes; none without images.

    One device encodes the images, one after the other.

    Raises:
        ValueError: The model does not see images, or its tower is trained.
    """
    vision, mesh = model_state.config.vision, model_state.mesh
    if not images.num:
        return []
    if vision is None:
        raise ValueError(f"images is {images.num}, but the model reads text only")
    if not model_state.args.freeze_vision_tower:
        raise ValueError("a trained tower is not supported by plans; leave freeze_vision_tower at True")
    patches, side = images.tokens * vision.patches_per_feature, vision.tower.positions_per_side
    if vision.tower.interpolated:
        shape = 1, bucket(images.tokens) * vision.patches_per_feature
    else:
        shape = bucket(-(-patches // side**2)), side**2
    taps = 4 if vision.tower.interpolated else 1
    own = ImageBatch(
        *(
            struct_with(jax.ShapeDtypeStruct((*shape, *dims), dtype), NamedSharding(mesh, PartitionSpec()))
            for dims, dtype in [
                ((vision.tower.patch_dims,), jnp.float32),
                ((), jnp.bool_),
                ((taps,), jnp.int32),
                ((taps,), jnp.float32),
                ((2,), jnp.int32),
            ]
        )
    )
    weights: Any = model_state.reference["vision"]
    arguments = {**model_state.own, "images": own}
    return [Program("encode_images", partial(_encode.trace, vision, weights, own), arguments, num_prompts * images.num)]
