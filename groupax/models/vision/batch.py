"""Rectangles of the patches of several images, with what a tower needs to know of each patch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from groupax.models.vision.config import TowerConfig, VisionConfig
from groupax.parallel.pytree import pytree
from groupax.types import Image


@pytree
class ImageBatch:
    """The tiles of several images, one per row.

    Attributes:
        patches: Values of N patches per tile.
        shown: Patches that others see; the others are padding.
        positions: Rows of the table of learned positions that each patch has a sum of.
        position_weights: Weights of that sum.
        cells: Row and column of each patch.
    """

    patches: Float[Any, "B N C"]
    shown: Bool[Any, "B N"]
    positions: Int[Any, "B N K"]
    position_weights: Float[Any, "B N K"]
    cells: Int[Any, "B N 2"]


def batch_images(config: VisionConfig, images: Sequence[Image]) -> tuple[ImageBatch, Int[np.ndarray, "I"]]:
    """Returns a rectangle of images, and the first of each image's features among those of the rectangle.

    The rectangle has one of few shapes (`bucket`), each of which is a program. Its padding sees only itself. The
    features of image i are the `num_features(config, image)` rows of `encode_images` from the i-th of these numbers on.

    Args:
        config: The part of the model that sees images.
        images: One or more images.

    Raises:
        ValueError: There are no images, or one of them does not fit the model.
    """
    if not images:
        raise ValueError("there are no images to encode")
    for image in images:
        _check(config, image)
    merged = config.patches_per_feature
    num_tiles = [image.patches.shape[0] for image in images]
    B = bucket(sum(num_tiles))
    N = merged * bucket(max(image.patches.shape[1] for image in images) // merged)
    if not config.tower.interpolated:  # all tiles are of one size, or nearly
        N = max(image.patches.shape[1] for image in images)
    K = 4 if config.tower.interpolated else 1
    batch = ImageBatch(
        np.zeros((B, N, config.tower.patch_dims), np.float32),
        np.zeros((B, N), bool),
        np.zeros((B, N, K), np.int32),
        np.zeros((B, N, K), np.float32),
        np.zeros((B, N, 2), np.int32),
    )
    firsts = np.cumsum([0, *num_tiles])[:-1]
    for first, image in zip(firsts, images, strict=True):
        tiles, own, _ = image.patches.shape
        rows = slice(first, first + tiles)
        cells = cells_of(image.grid, config.projector.merge)
        shown = np.ones((tiles, own), bool) if image.shown is None else image.shown
        batch.patches[rows, :own] = image.patches
        batch.shown[rows, :own] = shown
        batch.cells[rows, :own] = cells
        if config.tower.interpolated:
            positions, weights = interpolated_positions(config.tower, image.grid, cells)
        else:
            positions, weights = bucketed_positions(config.tower, cells, shown)
        batch.positions[rows, :own], batch.position_weights[rows, :own] = positions, weights
    return batch, (firsts * (N // merged)).astype(np.int32)


def bucket(number: int) -> int:
    """Rounds up to a number of the form 4, 5, 6 or 7 times a power of two, or to one of 1, 2, 3.

    >>> [bucket(number) for number in (1, 3, 9, 11, 100, 1025)]
    [1, 3, 10, 12, 112, 1280]
    """
    step = 1 << max(0, number.bit_length() - 3)
    return -(-number // step) * step


def _check(config: VisionConfig, image: Image) -> None:
    (_, N, C), (rows, columns), merge = image.patches.shape, image.grid, config.projector.merge
    if config.tower.patch_dims != C or rows * columns != N or rows % merge or columns % merge:
        raise ValueError(
            f"an image of {N} patches of {C} values in {rows} rows and {columns} columns does not fit the model, whose "
            f"patches have {config.tower.patch_dims} values and are merged in squares of {merge} x {merge}"
        )
    side = config.tower.positions_per_side
    if not config.tower.interpolated and max(rows, columns) > side:
        raise ValueError(
            f"an image of {rows} x {columns} patches is larger than the model's table of {side} x {side} positions; "
            "let the model's processor resize it"
        )


def cells_of(grid: tuple[int, int], merge: int) -> Int[np.ndarray, "N 2"]:
    """Returns the row and column of each patch, with the patches of a feature next to each other."""
    rows, columns = grid
    cells = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    blocks = cells.reshape(rows // merge, merge, columns // merge, merge, 2)
    return blocks.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int32)


def bucketed_positions(
    tower: TowerConfig, cells: Int[np.ndarray, "N 2"], shown: Bool[np.ndarray, "I N"]
) -> tuple[Int[np.ndarray, "I N 1"], Float[np.ndarray, "I N 1"]]:
    """Returns the cell of the table of positions in which each patch begins, if the shown part is scaled to the table.

    Patches that are not shown have the first one. All is computed in float32, as in transformers' Idefics 3, where a
    patch may begin exactly at the end of a cell, and rounding decides.
    """
    side = tower.positions_per_side
    ends = _cell_ends(side)
    positions = np.zeros(shown.shape, np.int32)
    for tile, own in enumerate(shown):
        buckets = []
        for coordinate in (0, 1):
            count = np.float32(len(np.unique(cells[own, coordinate])))
            fraction = cells[:, coordinate].astype(np.float32) * (np.float32(1.0) / count)
            buckets.append(np.searchsorted(ends, np.minimum(fraction, np.float32(1 - 1e-6)), side="right"))
        positions[tile] = np.where(own, buckets[0] * side + buckets[1], 0)
    return positions[..., None], np.ones((*shown.shape, 1), np.float32)


def _cell_ends(side: int) -> Float[np.ndarray, "S"]:
    """Returns the ends k / side of the cells, rounded as by `torch.arange` on a CPU with AVX2.

    It computes 16 numbers at a time as two vectors, each from its first number in float32, and those left one by one.
    """
    step, lanes = 1 / side, 8
    k, num = np.arange(side - 1), int(np.ceil((1.0 - step) / step))
    firsts = (step + step * (k // lanes * lanes)).astype(np.float32)
    in_vectors = k < num // (2 * lanes) * (2 * lanes)
    return np.where(in_vectors, firsts + k % lanes * step, step + step * k).astype(np.float32)


def interpolated_positions(
    tower: TowerConfig, grid: tuple[int, int], cells: Int[np.ndarray, "N 2"]
) -> tuple[Int[np.ndarray, "N 4"], Float[np.ndarray, "N 4"]]:
    """Returns the four cells of the table of positions around each patch and their weights, bilinear, in float32.

    The corners of the image have the positions of the table's corners.
    """
    side, nearest, weights = tower.positions_per_side, [], []
    for coordinate in (0, 1):
        at = cells[:, coordinate].astype(np.float32) * np.float32(side - 1) / np.float32(max(grid[coordinate] - 1, 1))
        below = np.floor(at)
        taps = below[:, None].astype(np.int32) + np.arange(2, dtype=np.int32)
        distance = np.abs(at[:, None] - below[:, None] - np.arange(2, dtype=np.float32))
        nearest.append(np.clip(taps, 0, side - 1))
        weights.append(np.maximum(1 - distance, 0).astype(np.float32))
    positions = nearest[0][:, :, None] * side + nearest[1][:, None, :]
    return positions.reshape(-1, 4), (weights[0][:, :, None] * weights[1][:, None, :]).reshape(-1, 4)
