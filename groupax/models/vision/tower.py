"""Turns the patches of images into features in place of tokens: a vision transformer and a projector."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from groupax.models.attention import attend_to_shown
from groupax.models.config import AttentionConfig
from groupax.models.layers import layer_norm, linear, zero_centered_rms_norm
from groupax.models.lookup import lookup
from groupax.models.matmul import dense_linear
from groupax.models.rope import Tables, apply_rope
from groupax.models.vision.batch import ImageBatch
from groupax.models.vision.config import (
    AveragePool,
    PatchMerger,
    PixelShuffle,
    TowerActivation,
    TowerConfig,
    VisionConfig,
)

MERGER_EPS = 1e-6  # of the norms in Qwen's mergers


def encode_images(config: VisionConfig, params: dict[str, Any], batch: ImageBatch) -> Float[Array, "levels F D"]:
    """Computes the features of images, which take the place of tokens (see `decoder.ImageInputs`).

    The backward pass recomputes the layers of the tower. It has one program per shape of the batch and can run on its
    own or as a part of another one. The features of an image do not depend on the other images, but those of different
    shapes of a batch may differ in their last bits.

    Args:
        config: The part of the model that sees images.
        params: Its weights, `params["vision"]` of the model's.
        batch: Images (`batch.batch_images`, which also says which features are whose).
    """
    (B, N, _), dtype = batch.patches.shape, params["patch"].dtype
    x = dense_linear(jnp.asarray(batch.patches).astype(dtype), params["patch"].reshape(config.tower.hidden_size, -1))
    x = x + params["patch_bias"][None, None]
    weights = jnp.asarray(batch.position_weights).astype(dtype)[..., None]
    places = lookup(params["positions"], jnp.asarray(batch.positions).reshape(-1)).reshape(B, N, -1, x.shape[-1])
    x = x + jnp.sum(places * weights, axis=2)
    tables = None if config.tower.rope_theta is None else _rope_tables(config.tower, jnp.asarray(batch.cells))
    # an image without anything to see, as in the padding of a batch, sees itself, so that all numbers are finite
    shown = jnp.asarray(batch.shown)
    shown = shown | ~jnp.any(shown, axis=1, keepdims=True)
    layer = jax.jit(jax.checkpoint(partial(_layer, config.tower)))
    after: dict[int, Array] = {}
    for index, weights in enumerate(params["layers"]):
        x = after[index] = layer(x, weights, shown, tables)
    if config.tower.final_norm:
        x = _norm(config.tower, x, params, "final_norm")
    features = _project(config, params["projector"], x, after)
    return features.reshape(features.shape[0], -1, features.shape[-1])


def _layer(
    tower: TowerConfig, x: Float[Array, "B N D"], weights: dict[str, Any], shown: Array, tables: Tables | None
) -> Float[Array, "B N D"]:
    x = x + _attention(tower, _norm(tower, x, weights, "attention_norm"), weights, shown, tables)
    h = _norm(tower, x, weights, "mlp_norm")
    h = _activation(tower.activation, linear(h, weights["up"], weights["up_bias"]))
    return x + linear(h, weights["down"], weights["down_bias"])


def _attention(
    tower: TowerConfig, h: Float[Array, "B N D"], weights: dict[str, Any], shown: Array, tables: Tables | None
) -> Float[Array, "B N D"]:
    B, N, D = h.shape
    if tower.fused_qkv:
        q, k, v = jnp.split(linear(h, weights["qkv"], weights["qkv_bias"]), 3, axis=-1)
    else:
        q, k, v = (linear(h, weights[name], weights[f"{name}_bias"]) for name in ("q", "k", "v"))
    q, k, v = (x.reshape(B, N, tower.num_heads, tower.head_dim) for x in (q, k, v))
    if tables is not None:
        q, k = (_rotated(x, tables) for x in (q, k))
    out = attend_to_shown(q, k, v, shown, AttentionConfig(tower.head_dim**-0.5))
    return linear(out.reshape(B, N, D), weights["out"], weights["out_bias"])


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
            normed = zero_centered_rms_norm(pooled, weights["norm"], eps)
            return dense_linear(normed, weights["projection"].T)[None]
        case PatchMerger(_, layers):
            first, *later = weights["mergers"]
            h = layer_norm(x, first["norm"], MERGER_EPS) + first["norm_bias"][None, None]
            features = [_merger(first, _joined(h, num))]
            for layer, own in zip(layers, later, strict=True):
                h = layer_norm(_joined(after[layer], num), own["norm"], MERGER_EPS) + own["norm_bias"][None, None]
                features.append(_merger(own, h))
            return jnp.stack(features)


def _joined(x: Float[Array, "B N D"], num: int) -> Float[Array, "B n C"]:
    return x.reshape(x.shape[0], -1, num * x.shape[-1])


def _merger(weights: dict[str, Any], h: Float[Array, "B n C"]) -> Float[Array, "B n E"]:
    h = _activation("gelu", linear(h, weights["up"], weights["up_bias"]))
    return linear(h, weights["down"], weights["down_bias"])


def _activation(kind: TowerActivation, x: Float[Array, "*M F"]) -> Float[Array, "*M F"]:
    return jax.nn.gelu(x, approximate=kind == "gelu_pytorch_tanh")


def _norm(tower: TowerConfig, x: Float[Array, "B N D"], weights: dict[str, Any], name: str) -> Float[Array, "B N D"]:
    """Applies a layer norm with its bias."""
    return layer_norm(x, weights[name], tower.norm_eps) + weights[f"{name}_bias"][None, None]
