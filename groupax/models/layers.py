"""Norms, rotary embeddings and projections: functions of arrays, for any leading dims."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from groupax.models.adapted import Adapted, low_rank_product
from groupax.models.config import ModelConfig
from groupax.models.nf4 import Nf4, dequantized

# A matrix, one with fewer bits and scales (see `models.quantize`), or either with a low-rank change beside it.
Weight = Array | Any


def rms_norm(x: Float[Array, "*M D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*M D"]:
    """x / rms(x) * weight, with the statistic in float32 (arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    inverse_rms = lax.rsqrt(sum_last(jnp.square(wide)) * (1.0 / wide.shape[-1]) + eps)
    return (wide * inverse_rms).astype(x.dtype) * jnp.expand_dims(weight, tuple(range(x.ndim - 1)))


def einsum_f32(subscripts: str, x: Array, y: Array) -> Array:
    """A product whose sums and result are float32 whatever the inputs are."""
    if x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # XLA's CPU backend does not have all products of bfloat16 to float32
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def sum_last(x: Float[Array, "*M S"]) -> Float[Array, "*M 1"]:
    """The sum over the last dim, of float32 numbers, as a matrix product.

    On CPU its order of additions depends on nothing but S, and zeros before and behind, in multiples of 8, change no
    bit of it; the compiler's own reductions are vectorized in ways that depend on the surrounding shapes. (A product
    with a single column of ones would take another path than a matrix product.)
    """
    ones = jnp.ones((2, x.shape[-1]), x.dtype)
    return jnp.einsum("...s,os->...o", x, ones, precision=lax.Precision.HIGHEST)[..., :1]


def linear(x: Float[Array, "*M I"], weight: Weight, bias: Array | None = None) -> Float[Array, "*M O"]:
    """weight x (+ bias), with the weight as checkpoints have it, [O, I], quantized, or with a low-rank change.

    In this layout XLA's CPU backend adds up a row's products in the same order whether there are 8 rows or 8,000,
    so that decoding and training get the same bits; with [in, out] they would not.
    """
    if isinstance(weight, Adapted):
        return linear(x, weight.base, bias) + low_rank_product(x, weight)
    y = jnp.einsum("...i,oi->...o", x, weight) if isinstance(weight, Array) else _quantized_product(x, weight)
    return y if bias is None else y + jnp.expand_dims(bias, tuple(range(y.ndim - 1)))


@jax.custom_vjp
def _quantized_product(x: Float[Array, "*M I"], weight: Any) -> Float[Array, "*M O"]:
    """weight x, with no gradient for the weight; the backward pass finds its bits and makes numbers of them again."""
    weight = _after(x, weight)
    if isinstance(weight, Nf4):
        return jnp.einsum("...i,oi->...o", x, dequantized(weight, x.dtype))
    return jnp.einsum("...i,oi->...o", x, weight.qvalue.astype(x.dtype)) * _scales(weight, x)


def _quantized_product_forward(x: Array, weight: Any) -> tuple[Array, Any]:
    return _quantized_product(x, weight), weight


def _quantized_product_backward(weight: Any, gradient: Array) -> tuple[Array, None]:
    weight = _after(gradient, weight)
    if isinstance(weight, Nf4):
        return jnp.einsum("...o,oi->...i", gradient, dequantized(weight, gradient.dtype)), None
    scaled = gradient * _scales(weight, gradient)
    return jnp.einsum("...o,oi->...i", scaled, weight.qvalue.astype(gradient.dtype)), None


def _after(x: Array, weight: Any) -> Any:
    """The same weight with its bits as a function of x.

    Otherwise compilers make all layers' numbers first, or keep them from the forward to the backward pass: a model in
    full precision. (XLA's CPU backend looks through an optimization barrier.)
    """
    zero = (x.reshape(-1)[0] * 0.0).astype(jnp.uint8)
    if isinstance(weight, Nf4):
        return replace(weight, codes=weight.codes ^ zero)
    bits = lax.bitcast_convert_type(weight.qvalue, jnp.uint8) ^ zero
    return replace(weight, qvalue=lax.bitcast_convert_type(bits, weight.qvalue.dtype))


_quantized_product.defvjp(_quantized_product_forward, _quantized_product_backward)


def vocabulary_logits(hidden: Float[Array, "*M D"], head: Weight) -> Float[Array, "*M V"]:
    """head hidden, float32; the head may be quantized."""
    if isinstance(head, Array):
        return einsum_f32("...d,vd->...v", hidden, head)
    wide = einsum_f32("...d,vd->...v", hidden, head.qvalue.astype(hidden.dtype))
    return wide * _scales(head, wide)


def _scales(weight: Any, x: Array) -> Float[Array, "*M O"]:
    """A quantized weight's scales, one per output, to be multiplied with the outputs."""
    return jnp.expand_dims(weight.scale[:, 0].astype(x.dtype), tuple(range(x.ndim - 1)))


def rope_frequencies(config: ModelConfig) -> Float[np.ndarray, "R"]:
    """Radians per position of each of a head's R = H / 2 pairs of dims, float32 (arXiv:2104.09864).

    With Llama-3 scaling, pairs that turn less than `low_freq_factor` times within the original context are
    slowed by `factor`, those that turn more than `high_freq_factor` times are kept, and the rest is blended
    linearly in the number of turns (Llama 3.1's released model code; arXiv:2407.21783, section 3.4.2).
    """
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies.astype(np.float32)
    turns = scaling.original_max_positions * frequencies / (2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (frequencies * (kept + (1.0 - kept) / scaling.factor)).astype(np.float32)


def rope_tables(config: ModelConfig, positions: Int[Array, "M"], dtype: jnp.dtype) -> tuple[Array, Array]:
    """Cosine and sine of each position's angles, [M, 1, H/2] each: computed in float32, then cast."""
    angles = positions[:, None, None].astype(jnp.float32) * rope_frequencies(config)[None, None, :]
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: Float[Array, "M N H"], tables: tuple[Array, Array]) -> Float[Array, "M N H"]:
    """Apply rotary embeddings; a head's first half pairs with its second half, as Hugging Face checkpoints do."""
    cos, sin = tables
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def swiglu(
    x: Float[Array, "*M D"],
    gate: Weight,
    up: Weight,
    down: Weight,
    biases: tuple[Array | None, Array | None, Array | None],
) -> Float[Array, "*M D"]:
    """down(silu(gate x) * up x) (arXiv:2002.05202, without its constant)."""
    gate_bias, up_bias, down_bias = biases
    return linear(jax.nn.silu(linear(x, gate, gate_bias)) * linear(x, up, up_bias), down, down_bias)
