"""Turns the patches of images into features in place of tokens: a vision transformer and a projector."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from groupax.core.types import Image
from groupax.models.attention import attend_to_shown
from groupax.models.config import AttentionConfig
from groupax.models.layers import linear, lookup, norm
from groupax.models.matmul import dense_linear
from groupax.models.rope import Tables, apply_rope
from groupax.models.vision.config import (
    AveragePool,
    PatchMerger,
    PixelShuffle,
    TowerActivation,
    TowerConfig,
    VisionConfig,
)
from groupax.models.vision.placement import num_features
from groupax.parallel.pytree import pytree


@pytree
class ImageBatch:
    """The tiles of several images, one per row.

    Attributes:
        patches: Values of N patches per tile; in a tower with windows those of a window stand together.
        shown: Patches that others see; the others are padding.
        positions: Rows of the table of learned positions that each patch has a sum of.
        position_weights: Weights of that sum.
        cells: Row and column of each patch.
        places: Place in the row of each patch in the image's own order, for a tower with windows; None for others.
    """

    patches: Float[Any, "B N C"]
    shown: Bool[Any, "B N"]
    positions: Int[Any, "B N K"]
    position_weights: Float[Any, "B N K"]
    cells: Int[Any, "B N 2"]
    places: Int[Any, "B N"] | None = None


def batch_images(config: VisionConfig, images: Sequence[Image]) -> tuple[ImageBatch, Int[np.ndarray, "I"]]:
    """Returns a rectangle of images, and the first of each image's features among those of the rectangle.

    The rectangle has one of few shapes (`bucket`), each of which is a program. Its padding sees only itself. The
    features of image i are the `num_features(config, image)` rows of `encode_images` from the i-th of these numbers on.

    Raises:
        ValueError: There are no images, or one of them does not fit the model.
    """
    if not images:
        raise ValueError("there are no images to encode")
    for image in images:
        _check(config, image)
    tower, merged = config.tower, config.patches_per_feature
    num_tiles = [image.patches.shape[0] for image in images]
    places = [_places(config, image.grid) for image in images]
    B, N = bucket(sum(num_tiles)), 1 + max(int(own.max()) for own in places)
    if config.has_grid_positions:  # otherwise all tiles are of one size, or nearly
        together = merged if tower.window is None else tower.window**2
        N = together * bucket(-(-N // together))
    K = 4 if tower.interpolated else 1
    batch = ImageBatch(
        np.zeros((B, N, tower.patch_dims), np.float32),
        np.zeros((B, N), bool),
        np.zeros((B, N, K), np.int32),
        np.zeros((B, N, K), np.float32),
        np.zeros((B, N, 2), np.int32),
        None if tower.window is None else np.zeros((B, N), np.int32),
    )
    firsts = np.cumsum([0, *num_tiles])[:-1]
    for first, image, own in zip(firsts, images, places, strict=True):
        rows = slice(first, first + image.patches.shape[0])
        cells = cells_of(image.grid, config.projector.merge)
        batch.patches[rows, own] = image.patches
        batch.shown[rows, own] = True
        batch.cells[rows, own] = cells
        if batch.places is not None:
            batch.places[rows, : len(own)] = own
        if tower.positions_per_side is None:
            continue
        if tower.interpolated:
            positions, weights = interpolated_positions(tower.positions_per_side, image.grid, cells)
        else:
            positions, weights = bucketed_positions(tower.positions_per_side, cells)
        batch.positions[rows, own], batch.position_weights[rows, own] = positions, weights
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
    if side is not None and not config.tower.interpolated and max(rows, columns) > side:
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


def _places(config: VisionConfig, grid: tuple[int, int]) -> Int[np.ndarray, "N"]:
    """Returns the place in a row of an `ImageBatch` of each patch: its own, or window by window with their padding."""
    window, merge = config.tower.window, config.projector.merge
    if window is None:
        return np.arange(grid[0] * grid[1])
    cells, strides = cells_of(grid, merge), np.array([window, 1])
    in_window = np.argsort(cells_of((window, window), merge) @ strides)
    windows = cells // window @ np.array([-(-grid[1] // window), 1])
    return windows * window**2 + in_window[cells % window @ strides]


def bucketed_positions(
    side: int, cells: Int[np.ndarray, "N 2"]
) -> tuple[Int[np.ndarray, "N 1"], Float[np.ndarray, "N 1"]]:
    """Returns the cell of a table of positions in which each patch begins, if the image is scaled to the table.

    All is computed in float32, as in transformers' Idefics 3, where a patch may begin exactly at the end of a cell, and
    rounding decides.
    """
    ends, buckets = _cell_ends(side), []
    for coordinate in (0, 1):
        count = np.float32(len(np.unique(cells[:, coordinate])))
        fraction = cells[:, coordinate].astype(np.float32) * (np.float32(1.0) / count)
        buckets.append(np.searchsorted(ends, np.minimum(fraction, np.float32(1 - 1e-6)), side="right"))
    return (buckets[0] * side + buckets[1]).astype(np.int32)[:, None], np.ones((len(cells), 1), np.float32)


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
    side: int, grid: tuple[int, int], cells: Int[np.ndarray, "N 2"]
) -> tuple[Int[np.ndarray, "N 4"], Float[np.ndarray, "N 4"]]:
    """Returns the four cells of the table of positions around each patch and their weights, bilinear, in float32.

    The corners of the image have the positions of the table's corners.
    """
    nearest, weights = [], []
    for coordinate in (0, 1):
        at = cells[:, coordinate].astype(np.float32) * np.float32(side - 1) / np.float32(max(grid[coordinate] - 1, 1))
        below = np.floor(at)
        taps = below[:, None].astype(np.int32) + np.arange(2, dtype=np.int32)
        distance = np.abs(at[:, None] - below[:, None] - np.arange(2, dtype=np.float32))
        nearest.append(np.clip(taps, 0, side - 1))
        weights.append(np.maximum(1 - distance, 0).astype(np.float32))
    positions = nearest[0][:, :, None] * side + nearest[1][:, None, :]
    return positions.reshape(-1, 4), (weights[0][:, :, None] * weights[1][:, None, :]).reshape(-1, 4)


def encode_images(config: VisionConfig, params: dict[str, Any], batch: ImageBatch) -> Float[Array, "levels F D"]:
    """Computes the features of images, which take the place of tokens (see `decoder.ImageInputs`).

    The backward pass recomputes the layers of the tower. It has one program per shape of the batch and can run on its
    own or as a part of another one. The features of an image do not depend on the other images, but those of different
    shapes of a batch may differ in their last bits.

    Args:
        batch: Images (of `batch_images`, which also says which features are whose).
    """
    (B, N, _), dtype = batch.patches.shape, params["patch"].dtype
    x = dense_linear(jnp.asarray(batch.patches).astype(dtype), params["patch"].reshape(config.tower.hidden_size, -1))
    if config.tower.patch_bias:
        x = x + params["patch_bias"][None, None]
    if config.tower.positions_per_side is not None:
        weights = jnp.asarray(batch.position_weights).astype(dtype)[..., None]
        learned = lookup(params["positions"], jnp.asarray(batch.positions).reshape(-1)).reshape(B, N, -1, x.shape[-1])
        x = x + jnp.sum(learned * weights, axis=2)
    tables = None if config.tower.rope_theta is None else _rope_tables(config.tower, jnp.asarray(batch.cells))
    window, shown = config.tower.window, jnp.asarray(batch.shown)
    layer = jax.jit(jax.checkpoint(partial(_layer, config.tower), static_argnums=0), static_argnums=0)
    after: dict[int, Array] = {}
    for index, weights in enumerate(params["layers"]):
        num = N if window is None or index in config.tower.whole_layers else window**2
        x = after[index] = layer(num, x, weights, shown, tables)
    if config.tower.final_norm:
        x = _norm(config.tower, x, params, "final_norm")
    features = _project(config, params["projector"], x, after)
    if batch.places is not None:
        num = config.patches_per_feature
        features = jnp.take_along_axis(features, jnp.asarray(batch.places)[None, :, ::num, None] // num, axis=2)
    return features.reshape(features.shape[0], -1, features.shape[-1])


def _layer(
    tower: TowerConfig, num: int, x: Float[Array, "B N D"], weights: dict[str, Any], shown: Array, tables: Tables | None
) -> Float[Array, "B N D"]:
    """Computes a layer in which each `num` patches that follow each other see each other."""
    x = x + _attention(tower, num, _norm(tower, x, weights, "attention_norm"), weights, shown, tables)
    h = _norm(tower, x, weights, "mlp_norm")
    up = linear(h, weights["up"], weights["up_bias"])
    if tower.is_gated:
        h = _activation(tower.activation, linear(h, weights["gate"], weights["gate_bias"])) * up
    else:
        h = _activation(tower.activation, up)
    return x + linear(h, weights["down"], weights["down_bias"])


def _attention(
    tower: TowerConfig, num: int, h: Float[Array, "B N D"], weights: dict[str, Any], shown: Array, tables: Tables | None
) -> Float[Array, "B N D"]:
    if tower.fused_qkv:
        q, k, v = jnp.split(linear(h, weights["qkv"], weights["qkv_bias"]), 3, axis=-1)
    else:
        q, k, v = (linear(h, weights[name], weights[f"{name}_bias"]) for name in ("q", "k", "v"))
    q, k, v = (x.reshape(-1, num, tower.num_heads, tower.head_dim) for x in (q, k, v))
    if tables is not None:
        q, k = (_rotated(x, tables) for x in (q, k))
    # patches that see nothing, as in the padding of a batch, see each other, so that all numbers are finite
    shown = shown.reshape(-1, num)
    shown = shown | ~jnp.any(shown, axis=1, keepdims=True)
    out = attend_to_shown(q, k, v, shown, AttentionConfig(tower.head_dim**-0.5))
    return linear(out.reshape(h.shape), weights["out"], weights["out_bias"])


def _rotated(x: Float[Array, "B N n H"], tables: Tables) -> Float[Array, "B N n H"]:
    flat = x.reshape(-1, *x.shape[2:]).astype(jnp.float32)
    return apply_rope(flat, tables).astype(x.dtype).reshape(x.shape)


def _rope_tables(tower: TowerConfig, cells: Int[Array, "B N 2"]) -> Tables:
    """Computes cosines and sines of the angles of rows, in the first half of each head's pairs, and of columns."""
    dims = tower.head_dim // 2
    assert tower.rope_theta is not None, "the tower has rotary embeddings"
    frequencies = (tower.rope_theta ** -(np.arange(0, dims, 2) / dims)).astype(np.float32)
    angles = cells.reshape(-1, 2, 1).astype(jnp.float32) * frequencies[None, None, :]
    angles = jnp.tile(angles.reshape(-1, 1, 2 * len(frequencies)), 2)
    return jnp.cos(angles), jnp.sin(angles)


def _project(
    config: VisionConfig, weights: dict[str, Any], x: Float[Array, "B N D"], after: dict[int, Array]
) -> Float[Array, "levels B n E"]:
    """Merges the vectors of neighbouring patches, which follow each other, to features of each level."""
    num = config.patches_per_feature
    match config.projector:
        case PixelShuffle():
            return linear(_joined(x, num), weights["projection"])[None]
        case AveragePool(_, eps):
            pooled = jnp.mean(x.reshape(x.shape[0], -1, num, x.shape[-1]), axis=2)
            normed = norm(pooled, weights["norm"], eps, "zero_centered_rms")
            return dense_linear(normed, weights["projection"].T)[None]
        case PatchMerger(_, layers):
            first, *later = weights["mergers"]
            features = [_merger(first, _joined(_norm(config.tower, x, first, "norm"), num))]
            for layer, own in zip(layers, later, strict=True):
                features.append(_merger(own, _norm(config.tower, _joined(after[layer], num), own, "norm")))
            return jnp.stack(features)


def _joined(x: Float[Array, "B N D"], num: int) -> Float[Array, "B n C"]:
    return x.reshape(x.shape[0], -1, num * x.shape[-1])


def _merger(weights: dict[str, Any], h: Float[Array, "B n C"]) -> Float[Array, "B n E"]:
    h = _activation("gelu", linear(h, weights["up"], weights["up_bias"]))
    return linear(h, weights["down"], weights["down_bias"])


def _activation(kind: TowerActivation, x: Float[Array, "*M F"]) -> Float[Array, "*M F"]:
    match kind:
        case "silu":
            return jax.nn.silu(x)
        case "quick_gelu":
            return x * jax.nn.sigmoid(1.702 * x)
        case _:
            return jax.nn.gelu(x, approximate=kind == "gelu_pytorch_tanh")


def _norm(tower: TowerConfig, x: Float[Array, "B N D"], weights: dict[str, Any], name: str) -> Float[Array, "B N D"]:
    """Applies a norm with its bias, if it has one."""
    normed, bias = norm(x, weights[name], tower.norm_eps, tower.norm), weights.get(f"{name}_bias")
    return normed if bias is None else normed + bias[None, None]


MAX_SETS = 3  # of weights whose features are kept: the policy's, its reference's, and those of an older policy

_encode = jax.jit(encode_images, static_argnums=0)


class FeatureCache:
    """Features of the most recently used images in host memory.

    Each image is encoded on its own, so that its features depend on nothing but itself and the weights. A frozen tower
    encodes an image once for all rollouts and updates, as long as its features fit. Threads may share a cache.

    Args:
        max_bytes: Size of the features that are kept, in bytes.

    Attributes:
        num_bytes: Size of the stored features.
        num_encoded: Number of images that were encoded.
    """

    def __init__(self, config: VisionConfig, max_bytes: int) -> None:
        self.config, self.max_bytes = config, max_bytes
        self.num_bytes = self.num_encoded = 0
        # arrays, whose identities are the key, and a copy on one device; both are kept in the order of their last use
        self._sets: OrderedDict[tuple[int, ...], tuple[list[Any], dict[str, Any]]] = OrderedDict()
        self._features: OrderedDict[tuple[tuple[int, ...], str], np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def features(self, params: dict[str, Any], images: Sequence[Image]) -> list[Float[np.ndarray, "levels _ D"]]:
        """Returns the features of images, in their order.

        Args:
            params: Weights of the part that sees images, `params["vision"]` of the model's, replicated. The same arrays
                are the same weights.
            images: Images, which may be the same several times.
        """
        with self._lock:
            weights = self._use(params)
            found: dict[str, np.ndarray] = {}
            for image in images:
                if image.digest not in found:
                    found[image.digest] = self._find(weights, image)
            return [found[image.digest] for image in images]

    def _find(self, weights: tuple[int, ...], image: Image) -> np.ndarray:
        key = weights, image.digest
        if key in self._features:
            self._features.move_to_end(key)
            return self._features[key]
        batch, [first] = batch_images(self.config, [image])
        features = _encode(self.config, self._sets[weights][1], batch)
        self.num_encoded += 1
        own = np.asarray(features)[:, first : first + num_features(self.config, image)].copy()
        if own.nbytes <= self.max_bytes:
            self._features[key] = own
            self.num_bytes += own.nbytes
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._features.popitem(last=False)[1].nbytes
        return own

    def _use(self, params: dict[str, Any]) -> tuple[int, ...]:
        """Returns the key of a set of weights, of which one device of this process gets a copy."""
        leaves = jax.tree.leaves(params)
        key = tuple(map(id, leaves))
        if key not in self._sets:
            local = jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, params)
            self._sets[key] = leaves, local
        self._sets.move_to_end(key)
        if len(self._sets) > MAX_SETS:
            dropped, _ = self._sets.popitem(last=False)
            for each in [each for each in self._features if each[0] == dropped]:
                self.num_bytes -= self._features.pop(each).nbytes
        return key
