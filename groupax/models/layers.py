"""Norms and projections: functions of arrays, for any leading dims."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from groupax.models.adapted import AdaptedWeight, low_rank_linear
from groupax.models.config import Activation, NormKind
from groupax.models.matmul import dense_linear, matmul, matmul_nt
from groupax.models.nf4 import Nf4, dequantize_nf4
from groupax.parallel.collectives import Axis, psum, psum_grad
from groupax.parallel.platform import traced_platform

# A matrix, one with fewer bits and scales (see `models.quantize`), or either with a low-rank change beside it.
Weight = Array | Any


def rms_norm(x: Float[Array, "*M D"], weight: Float[Array, "*W"], eps: float) -> Float[Array, "*M D"]:
    """x / rms(x) * weight, with the statistic in float32 (arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse_rms).astype(x.dtype) * _for_last(weight, x)


def zero_centered_rms_norm(x: Float[Array, "*M D"], weight: Float[Array, "*W"], eps: float) -> Float[Array, "*M D"]:
    """x / rms(x) * (1 + weight), all in float32 (Gemma's released model code)."""
    wide = x.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse_rms * _for_last(1.0 + weight.astype(jnp.float32), x)).astype(x.dtype)


def layer_norm(x: Float[Array, "*M D"], weight: Float[Array, "*W"], eps: float) -> Float[Array, "*M D"]:
    """(x - mean(x)) / deviation(x) * weight, without a bias, all in float32 (arXiv:1607.06450)."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse_deviation = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (centred * inverse_deviation * _for_last(weight.astype(jnp.float32), x)).astype(x.dtype)


NORMS: dict[NormKind, Callable[[Array, Array, float], Array]] = {
    "rms": rms_norm,
    "zero_centered_rms": zero_centered_rms_norm,
    "layer": layer_norm,
}
ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


def softcapped(x: Float[Array, "*M S"], softcap: float | None) -> Float[Array, "*M S"]:
    """Returns softcap tanh(x / softcap) (arXiv:2408.00118, section 2), or x itself if the softcap is None."""
    return x if softcap is None else jnp.tanh(x * np.float32(1.0 / softcap)) * np.float32(softcap)


def scaled(x: Array, scale: float) -> Array:
    """x times a number that is not rounded to x's dtype."""
    return x if scale == 1.0 else (x.astype(jnp.float32) * np.float32(scale)).astype(x.dtype)


def _for_last(weight: Float[Array, "*W"], x: Float[Array, "*M D"]) -> Array:
    """A weight of the last dims of x, for each of the others."""
    return _for_each(weight, x.shape[: x.ndim - weight.ndim])


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _for_each(weight: Array, leading: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(weight, (*leading, *weight.shape))


def _sum_of_each(leading: tuple[int, ...], _: None, cotangent: Array) -> tuple[Array]:
    """Sums over all tokens in float32; on CPU as a matrix product, because XLA's reductions over leading dims are slow
    there.
    """
    own = cotangent.shape[len(leading) :]
    flat = cotangent.reshape(math.prod(leading), math.prod(own))
    if traced_platform() == "cpu":
        total = matmul(jnp.ones((1, len(flat)), flat.dtype), flat)
    else:
        total = jnp.sum(flat, axis=0, dtype=jnp.float32)
    return (total.reshape(own).astype(cotangent.dtype),)


_for_each.defvjp(lambda weight, leading: (_for_each(weight, leading), None), _sum_of_each)


def linear(x: Float[Array, "*M I"], weight: Weight, bias: Array | None = None) -> Float[Array, "*M O"]:
    """Returns weight x (+ bias), with the weight in the layout of checkpoints, [O, I], quantized, or adapted."""
    if isinstance(weight, AdaptedWeight):
        return linear(x, weight.base, bias) + low_rank_linear(x, weight)
    y = dense_linear(x, weight) if isinstance(weight, Array) else _quantized_product(x, weight)
    return y if bias is None else y + _for_last(bias, y)


def row_parallel_linear(
    x: Float[Array, "*M I"], weight: Weight, bias: Array | None, axis: Axis
) -> Float[Array, "*M O"]:
    """`linear`, of inputs that are split over a mesh axis like the weight's; the result is whole."""
    if axis is None:
        return linear(x, weight, bias)
    y = psum(linear(x, weight), axis)
    return y if bias is None else y + _for_last(bias, y)


@jax.custom_vjp
def _quantized_product(x: Float[Array, "*M I"], weight: Any) -> Float[Array, "*M O"]:
    """weight x, with no gradient for the weight; the backward pass finds its bits and makes numbers of them again."""
    weight = _after(x, weight)
    if isinstance(weight, Nf4):
        return dense_linear(x, dequantize_nf4(weight, x.dtype))
    return dense_linear(x, weight.qvalue.astype(x.dtype)) * _scales(weight, x)


def _quantized_product_forward(x: Array, weight: Any) -> tuple[Array, Any]:
    return _quantized_product(x, weight), weight


def _quantized_product_backward(weight: Any, gradient: Array) -> tuple[Array, None]:
    weight = _after(gradient, weight)
    if isinstance(weight, Nf4):
        return dense_linear(gradient, dequantize_nf4(weight, gradient.dtype).T), None
    scaled = gradient * _scales(weight, gradient)
    return dense_linear(scaled, weight.qvalue.astype(gradient.dtype).T), None


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


def vocabulary_logits(hidden: Float[Array, "*M D"], head: Weight, softcap: float | None = None) -> Float[Array, "*M V"]:
    """Returns head hidden in float32, softcapped if there is a softcap; the head may be quantized."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    if isinstance(head, Array):
        product = matmul_nt(flat, head)
    else:
        product = matmul_nt(flat, head.qvalue.astype(hidden.dtype))
        product = product * _scales(head, product)
    return softcapped(product.reshape(*hidden.shape[:-1], -1), softcap)


def _scales(weight: Any, x: Array) -> Float[Array, "*M O"]:
    """A quantized weight's scales, one per output, to be multiplied with the outputs."""
    return jnp.expand_dims(weight.scale[:, 0].astype(x.dtype), tuple(range(x.ndim - 1)))


def gated_activation(
    activation: Activation, gate: Float[Array, "*M F"], up: Float[Array, "*M F"]
) -> Float[Array, "*M F"]:
    """activation(gate) up; of fewer bits in float32 and rounded once."""
    return ACTIVATIONS[activation](gate) * up if gate.dtype == jnp.float32 else _gated_narrow(activation, gate, up)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_narrow(activation: Activation, gate: Array, up: Array) -> Array:
    return _gated_wide(activation, gate, up).astype(gate.dtype)


def _gated_wide(activation: Activation, gate: Array, up: Array) -> Float[Array, "*M F"]:
    return ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)


def _gated_backward(activation: Activation, factors: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    """From the factors alone, and as a function of the cotangent: XLA would keep float32 parts of the forward pass."""
    gate, up = factors
    gate = gate + cotangent.reshape(-1)[0] * jnp.asarray(0, cotangent.dtype)
    return jax.vjp(partial(_gated_wide, activation), gate, up)[1](cotangent.astype(jnp.float32))


_gated_narrow.defvjp(lambda activation, *factors: (_gated_narrow(activation, *factors), factors), _gated_backward)


def gated_mlp(
    x: Float[Array, "*M D"],
    gate: Weight,
    up: Weight,
    down: Weight,
    biases: tuple[Array | None, Array | None, Array | None],
    activation: Activation = "silu",
    axis: Axis = None,
) -> Float[Array, "*M D"]:
    """down(activation(gate x) * up x); with "silu", SwiGLU (arXiv:2002.05202, without its constant).

    With an axis, inside a shard_map, each of its devices has a part of the F dim.
    """
    gate_bias, up_bias, down_bias = biases
    x = psum_grad(x, axis)
    between = gated_activation(activation, linear(x, gate, gate_bias), linear(x, up, up_bias))
    return row_parallel_linear(between, down, down_bias, axis)
