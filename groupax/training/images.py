"""Images of the rows of a micro-batch: the places of their tokens, and what their features are computed from."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from groupax.core.types import Image, Row
from groupax.engine.images import joined_features
from groupax.models.logprobs import RaggedBatch, RaggedImages
from groupax.models.specs import Params
from groupax.models.vision.config import VisionConfig
from groupax.models.vision.placement import continued, image_blocks, num_features
from groupax.models.vision.tower import FeatureCache, ImageBatch, batch_images, encode_images
from groupax.parallel.pytree import pytree
from groupax.training.shapes import RowGroup


@pytree
class Features:
    """The features of a micro-batch's images: known ones, or images from which they are computed."""

    known: Float[Any, "F levels D"] | None = None  # features of each level; None if they are computed
    images: ImageBatch | None = None  # images of each shard; None if features are known
    # index of each feature among the rows of those that are computed; None if features are known
    rows: Int[Any, "F"] | None = None
    # a number per tile of the images that does not depend on the packing; None if features are known
    dropout_ids: UInt32[Any, "T"] | None = None


def with_images(
    vision: VisionConfig,
    ragged: RaggedBatch,
    rows: Sequence[Row],
    groups: Sequence[RowGroup],
    starts: Sequence[int],
) -> tuple[RaggedBatch, list[Image]]:
    """Returns the tokens of a shard with the images of its rows, of which equal ones have the same features.

    Rows of one group have the same images in their prompts. Only supervised examples have others in their completions.

    Args:
        vision: Architecture of what sees images.
        ragged: Tokens of the shard.
        rows: All rows.
        groups: Groups of rows in the shard.
        starts: First token of each row of the groups.

    Returns:
        The tokens, and the different images.
    """
    index, blocks = np.full((2, len(ragged.tokens)), -1, np.int32)
    positions = np.repeat(ragged.positions[:, None], 3, axis=1)
    firsts: dict[str, int] = {}
    images: list[Image] = []
    num, end = 0, 0
    row_starts = iter(starts)
    for group in groups:
        before, size_of_prompt = end, group.prompt
        end += group.prompt
        for row, start, length in zip(
            group.rows, row_starts, group.lengths, strict=False
        ):  # `row_starts` has those of later groups
            given = rows[row].images
            if given is None:
                continue
            of_features = np.zeros(sum(given.num_tokens), np.int32)
            first = 0
            for image, size in zip(given.images, given.num_tokens, strict=True):
                if image.digest not in firsts:
                    firsts[image.digest] = num
                    images.append(image)
                    num += size
                of_features[first : first + size] = firsts[image.digest] + np.arange(size)
                first += size
            placed = continued(given, size_of_prompt + length)
            parts = [(slice(start, start + length), slice(size_of_prompt, None))]
            if row == group.rows[0]:
                parts.append((slice(before, end), slice(size_of_prompt)))
            for own, part in parts:
                feature_index = placed.feature_index[part]
                index[own] = np.where(feature_index >= 0, of_features[feature_index], -1)
                blocks[own] = image_blocks(feature_index)
                if placed.positions is not None:
                    positions[own] = placed.positions[:, part].T
    of_tokens = RaggedImages(index, blocks if vision.sees_whole_images else None)
    if vision.has_grid_positions:
        ragged = replace(ragged, positions=positions)
    return replace(ragged, images=of_tokens), images


def known_features(cache: FeatureCache, params: dict[str, Any], images: Sequence[Sequence[Image]]) -> Features:
    """Returns the features of each shard's images, on the host."""
    return Features(known=joined_features([cache.features(params, own) for own in images]))


def computed_features(config: VisionConfig, images: Sequence[Sequence[Image]]) -> Features:
    """Returns what the features of each shard's images are computed from, on the host."""
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
        own_ids = np.concatenate([_image_dropout_ids(image) for image in own])
        ids[shard, : len(own_ids)] = own_ids
    joined: ImageBatch = jax.tree.map(lambda *shards: np.concatenate(shards), *tiles)
    return Features(images=joined, rows=rows.reshape(-1), dropout_ids=ids.reshape(-1))


def feature_values(
    vision: VisionConfig | None, features: Features | None, params: Params
) -> Float[Array, "levels F D"] | None:
    """Returns the features of a micro-batch's images, computed if they are not known; None without images."""
    if features is None:
        return None
    if features.known is not None:
        return jnp.swapaxes(features.known, 0, 1)
    assert vision is not None, "the model sees images"
    assert features.images is not None, "features are computed"
    assert features.rows is not None, "features are computed"
    return encode_images(vision, params["vision"], features.images)[:, features.rows]


def _image_dropout_ids(image: Image) -> UInt32[np.ndarray, "T"]:
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
