"""The images of a micro-batch: their features, or what these are computed from."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, UInt32

from groupax.engine.prefill import joined_features
from groupax.models.specs import Params
from groupax.models.vision.config import VisionConfig
from groupax.models.vision.placement import num_features
from groupax.models.vision.tower import FeatureCache, ImageBatch, batch_images
from groupax.training.batch import Features, MicroBatch, Packed
from groupax.types import Image


def with_features(
    packed: Packed, vision: VisionConfig | None, cache: FeatureCache | None, params: Params, is_differentiated: bool
) -> MicroBatch:
    """Returns a micro-batch with the features of its images, or with the images if their gradient is needed.

    Args:
        packed: The micro-batch and the images of each shard.
        vision: The part of the model that sees images; None for a model of text.
        cache: Features by image; None for a model of text.
        params: Weights of the model.
        is_differentiated: Whether the gradient of the features is needed.
    """
    if not packed.images:
        return packed.batch
    assert vision is not None, "the model sees images"
    assert cache is not None, "the model sees images"
    if is_differentiated:
        return replace(packed.batch, features=computed_features(vision, packed.images))
    return replace(packed.batch, features=known_features(cache, params["vision"], packed.images))


def known_features(cache: FeatureCache, params: dict[str, Any], images: Sequence[Sequence[Image]]) -> Features:
    """Returns the features of each shard's images, on the host.

    Args:
        cache: Features by image.
        params: Weights of the part of the model that sees images.
        images: Images of each shard, at least one in all.
    """
    return Features(known=joined_features([cache.features(params, own) for own in images]))


def computed_features(config: VisionConfig, images: Sequence[Sequence[Image]]) -> Features:
    """Returns what the features of each shard's images are computed from, on the host.

    Args:
        config: The part of the model that sees images.
        images: Images of each shard, at least one in all.
    """
    batches = [batch_images(config, own) if own else None for own in images]
    shapes = [batch.patches.shape for batch, _ in filter(None, batches)]
    num_tiles, num_patches = (max(shape[dim] for shape in shapes) for dim in (0, 1))
    counts = [sum(num_features(config, image) for image in own) for own in images]
    size = 1 << max(0, max(counts) - 1).bit_length()
    like = next(batch for batch, _ in filter(None, batches))
    tiles, rows = [], np.zeros((len(images), size), np.int32)
    ids = np.zeros((len(images), num_tiles), np.uint32)
    for shard, (own, given) in enumerate(zip(images, batches, strict=True)):
        if given is None:
            tiles.append(jax.tree.map(lambda x: np.zeros((num_tiles, num_patches, *x.shape[2:]), x.dtype), like))
            continue
        batch, firsts = given
        tiles.append(jax.tree.map(lambda x: _padded(x, num_tiles, num_patches), batch))
        per_tile = batch.patches.shape[1] // config.patches_per_feature
        index = [
            first // per_tile * (num_patches // config.patches_per_feature) + _features_of(config, image, num_patches)
            for first, image in zip(firsts, own, strict=True)
        ]
        rows[shard, : counts[shard]] = np.concatenate(index)
        own_ids = np.concatenate([_dropout_ids(image) for image in own])
        ids[shard, : len(own_ids)] = own_ids
    joined: ImageBatch = jax.tree.map(lambda *shards: np.concatenate(shards), *tiles)
    return Features(images=joined, rows=rows.reshape(-1), dropout_ids=ids.reshape(-1))


def _dropout_ids(image: Image) -> UInt32[np.ndarray, "T"]:
    """Spreads (image, tile) over 32 bits, the tiles by a large odd factor."""
    spread = np.arange(image.patches.shape[0], dtype=np.int64) * 0x9E3779B1 + int(image.digest[:8], 16)
    return (spread & 0xFFFFFFFF).astype(np.uint32)


def _padded(x: np.ndarray, num_tiles: int, num_patches: int) -> np.ndarray:
    return np.pad(x, [(0, num_tiles - x.shape[0]), (0, num_patches - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def _features_of(config: VisionConfig, image: Image, num_patches: int) -> Int[np.ndarray, "F"]:
    """Returns the indices of an image's features from its first one on, in tiles with this number of patches."""
    merged, (tiles, own, _) = config.patches_per_feature, image.patches.shape
    index = np.arange(tiles)[:, None] * (num_patches // merged) + np.arange(own // merged)[None]
    return index.reshape(-1)
