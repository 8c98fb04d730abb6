"""The tokens of a prompt that stand for images, and the positions of its tokens. Imports no jax."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from groupax.core.types import Image, PromptImages
from groupax.models.vision.config import VisionConfig


def make_image(patches: Float[np.ndarray, "I N C"], grid: tuple[int, int]) -> Image:
    """Returns an image with its digest."""
    patches = np.ascontiguousarray(patches, np.float32)
    digest = hashlib.sha256(repr((patches.shape, grid)).encode())
    digest.update(patches.tobytes())
    return Image(digest.hexdigest(), patches, grid)


def num_features(config: VisionConfig, image: Image) -> int:
    """Counts the features of an image, which is the number of tokens that stand for it."""
    tiles, patches, _ = image.patches.shape
    return tiles * (patches // config.patches_per_feature)


def place_images(config: VisionConfig, token_ids: Int[np.ndarray, "S"], images: Sequence[Image]) -> PromptImages:
    """Assigns the features of images to the tokens of a prompt that stand for them, in their order.

    Args:
        token_ids: Tokens of the prompt, with one `image_token_id` per feature.

    Raises:
        ValueError: The prompt has more or fewer such tokens than the images have features. Or positions have
            coordinates, and the tokens of an image do not follow each other.
    """
    counts = tuple(num_features(config, image) for image in images)
    is_image = np.asarray(token_ids) == config.image_token_id
    if int(is_image.sum()) != sum(counts):
        raise ValueError(
            f"the prompt has {int(is_image.sum())} image tokens ({config.image_token_id}), but its {len(counts)} "
            f"images have {sum(counts)} features ({', '.join(map(str, counts[:8]))}{', ...' * (len(counts) > 8)}); "
            "let the model's processor insert the tokens, and do not truncate the prompt within an image"
        )
    index = np.where(is_image, np.cumsum(is_image) - 1, -1).astype(np.int32)
    if not config.has_grid_positions:
        return PromptImages(tuple(images), counts, index)
    positions = _grid_positions(config, index, images, counts)
    # the text continues after the largest coordinate
    offset = int(positions.max(initial=-1)) + 1 - len(index)
    return PromptImages(tuple(images), counts, index, positions, offset)


def continued(images: PromptImages, size: int) -> PromptImages:
    """Returns the images of a prompt for its first tokens, or for a longer prompt that continues it by text."""
    old = len(images.feature_index)
    if size <= old:
        positions = None if images.positions is None else images.positions[:, :size]
        return replace(images, feature_index=images.feature_index[:size], positions=positions)
    index = np.concatenate([images.feature_index, np.full(size - old, -1, np.int32)])
    if images.positions is None:
        return replace(images, feature_index=index)
    later = np.broadcast_to(np.arange(old, size, dtype=np.int32) + images.position_offset, (3, size - old))
    return replace(images, feature_index=index, positions=np.concatenate([images.positions, later], axis=1))


def _grid_positions(
    config: VisionConfig, index: Int[np.ndarray, "S"], images: Sequence[Image], counts: Sequence[int]
) -> Int[np.ndarray, "3 S"]:
    """Computes the coordinates of all tokens: those of text are equal, and an image's are relative to its start.

    After an image the next position is as many further as its longer side has features (arXiv:2409.12191, 2.1).
    """
    positions = np.zeros((3, len(index)), np.int32)
    column = position = 0
    places = np.flatnonzero(index >= 0)
    for number, (image, count) in enumerate(zip(images, counts, strict=True)):
        start, places = int(places[0]), places[count:]
        if not np.array_equal(index[start : start + count], np.arange(index[start], index[start] + count)):
            raise ValueError(
                f"the {count} tokens of image {number} of the prompt are not next to each other, so that they have no "
                "positions in a grid"
            )
        text = start - column
        positions[:, column:start] = position + np.arange(text)
        position += text
        rows, columns = (side // config.projector.merge for side in image.grid)
        coordinates = np.stack(np.meshgrid(*map(np.arange, (len(image.patches), rows, columns)), indexing="ij"))
        positions[:, start : start + count] = position + coordinates.reshape(3, -1)
        column, position = start + count, position + max(rows, columns)
    positions[:, column:] = position + np.arange(len(index) - column)
    return positions


def image_blocks(feature_index: Int[np.ndarray, "S"]) -> Int[np.ndarray, "S"]:
    """Numbers the runs of neighbouring image tokens, which see each other if a model `sees_whole_images`; -1 for text.

    Args:
        feature_index: Feature of each token (see `PromptImages`).
    """
    is_image = feature_index >= 0
    begins = is_image & ~np.concatenate([[False], is_image[:-1]])
    return np.where(is_image, np.cumsum(begins) - 1, -1).astype(np.int32)
