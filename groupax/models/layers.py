"""Norms, projections and feed-forward blocks: functions of arrays with any leading dims."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from groupax.models.adapted import AdaptedWeight, change_inputs, low_rank_linear, row_factors
from groupax.models.config import Activation, ClampedSwiglu, GatedActivation, NormKind
from groupax.models.matmul import dense_linear, matmul, matmul_nt
from groupax.models.weights.nf4 import Nf4, dequantize_nf4
from groupax.parallel.collectives import Axis, psum, psum_grad
from groupax.parallel.runtime import traced_platform

# An array, a weight in 4 bits (`Nf4`), or either of these with a LoRA adapter.
Weight = Array | Any


def norm(x: Float[Array, "*M D"], weight: Float[Array, "*W"], eps: float, kind: NormKind) -> Float[Array, "*M D"]:
    """Computes x / rms(x) * weight, with the statistic in float32 ("rms", arXiv:1910.07467), or another norm.

    "layer" is (x - mean(x)) / std(x) * weight, without a bias (arXiv:1607.06450). The zero-centered ones multiply by
    1 + weight (Gemma's and Nemotron's released model code). All but "rms" are computed in float32 altogether.
    """
    return _norm(x, weight, eps, kind)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _norm(x: Array, weight: Array, eps: float, kind: NormKind) -> Array:
    return _norm_forward(x, weight, eps, kind)[0]


def _norm_forward(x: Array, weight: Array, eps: float, kind: NormKind) -> tuple[Array, tuple[Any, ...]]:
    """Saves x in its own dtype, and its mean, if it is subtracted, and inverse standard deviation per token."""
    mean = jnp.mean(x.astype(jnp.float32), axis=-1) if kind.endswith("layer") else None
    centered = _centered(x, mean)
    inverse_std = lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1) + eps)
    normed = centered * inverse_std[..., None]
    if kind == "rms":
        y = normed.astype(x.dtype) * _broadcast_weight(weight, x)
    else:
        y = (normed * _broadcast_weight(_norm_factor(weight, kind), x)).astype(x.dtype)
    return y, (x, weight, mean, inverse_std)


def _norm_backward(_: float, kind: NormKind, saved: tuple[Any, ...], cotangent: Array) -> tuple[Array, Array]:
    """Computes both gradients in float32 from what the forward pass saved, as a function of the cotangent."""
    x, weight, mean, inverse_std = saved
    normed = _centered(_depending_on(cotangent, x), mean) * inverse_std[..., None]
    wide = cotangent.astype(jnp.float32)
    slope = wide * _broadcast_weight(_norm_factor(weight, kind), x)
    d_x = slope - normed * jnp.mean(slope * normed, axis=-1, keepdims=True)
    d_x = d_x - jnp.mean(slope, axis=-1, keepdims=True) if mean is not None else d_x
    d_weight = _sum_leading(wide * normed, weight.ndim)
    return (d_x * inverse_std[..., None]).astype(x.dtype), d_weight.astype(weight.dtype)


_norm.defvjp(_norm_forward, _norm_backward)


def _centered(x: Float[Array, "*M D"], mean: Float[Array, "*M"] | None) -> Float[Array, "*M D"]:
    wide = x.astype(jnp.float32)
    return wide if mean is None else wide - mean[..., None]


def _norm_factor(weight: Float[Array, "*W"], kind: NormKind) -> Float[Array, "*W"]:
    return weight.astype(jnp.float32) + np.float32(kind.startswith("zero_centered"))


ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    **dict.fromkeys(("gelu_fast", "gelu_new", "gelu_pytorch_tanh"), partial(jax.nn.gelu, approximate=True)),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def softcapped(x: Float[Array, "*M S"], softcap: float | None) -> Float[Array, "*M S"]:
    """Returns softcap tanh(x / softcap) (arXiv:2408.00118, section 2), or x itself if the softcap is None."""
    return x if softcap is None else jnp.tanh(x * np.float32(1.0 / softcap)) * np.float32(softcap)


def scaled(x: Array, scale: float) -> Array:
    """Returns x times a scale that is not rounded to x's dtype."""
    return x if scale == 1.0 else (x.astype(jnp.float32) * np.float32(scale)).astype(x.dtype)


def _broadcast_weight(weight: Float[Array, "*W"], x: Float[Array, "*M D"]) -> Array:
    """Broadcasts a weight of the last dims of x over its leading dims."""
    return _broadcast(weight, x.shape[: x.ndim - weight.ndim])


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _broadcast(weight: Array, leading: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(weight, (*leading, *weight.shape))


def _broadcast_backward(leading: tuple[int, ...], _: None, cotangent: Array) -> tuple[Array]:
    return (_sum_leading(cotangent, cotangent.ndim - len(leading)).astype(cotangent.dtype),)


_broadcast.defvjp(lambda weight, leading: (_broadcast(weight, leading), None), _broadcast_backward)


def _sum_leading(x: Float[Array, "*M"], num_kept: int) -> Float[Array, "*W"]:
    """Sums over all but the last dims in float32.

    On CPU the sum is a matrix product, because XLA's reductions over leading dims are slow there.
    """
    shape = x.shape[x.ndim - num_kept :]
    flat = x.reshape(-1, math.prod(shape))
    if traced_platform() == "cpu":
        total = matmul(jnp.ones((1, len(flat)), flat.dtype), flat)
    else:
        total = jnp.sum(flat, axis=0, dtype=jnp.float32)
    return total.reshape(shape)


def _depending_on(cotangent: Array, x: Array) -> Array:
    """Returns x as a function of a cotangent, so that XLA recomputes what is made of it in the backward pass."""
    return x + (cotangent.reshape(-1)[0] * jnp.asarray(0, cotangent.dtype)).astype(x.dtype)


def linear(x: Float[Array, "*M I"], weight: Weight, bias: Array | None = None) -> Float[Array, "*M O"]:
    """Applies a weight [O, I] and an optional bias. The weight may be quantized or adapted."""
    if isinstance(weight, AdaptedWeight):
        inputs = change_inputs(x, weight)
        change = low_rank_linear(inputs, weight)
        if weight.norms is not None:
            factors = _broadcast_weight(row_factors(weight), change)  # in float32, since they are near 1
            change = factors.astype(x.dtype) * change + (factors - 1).astype(x.dtype) * linear(inputs, weight.base)
        return linear(x, weight.base, bias) + change
    return plus_bias(dense_linear(x, weight) if isinstance(weight, Array) else _quantized_linear(x, weight), bias)


def plus_bias(x: Float[Array, "*M O"], bias: Array | None) -> Float[Array, "*M O"]:
    """Returns x plus a bias [O], or x itself if there is none."""
    return x if bias is None else x + _broadcast_weight(bias, x)


def row_parallel_linear(
    x: Float[Array, "*M I"], weight: Weight, bias: Array | None, axis: Axis
) -> Float[Array, "*M O"]:
    """Applies `linear` to an input dim that is sharded over a mesh axis; the result is replicated."""
    if axis is None:
        return linear(x, weight, bias)
    return plus_bias(psum(linear(x, weight), axis), bias)


@jax.custom_vjp
def _quantized_linear(x: Float[Array, "*M I"], weight: Nf4) -> Float[Array, "*M O"]:
    """Applies a quantized weight, which gets no gradient. The backward pass dequantizes it again."""
    return dense_linear(x, dequantize_nf4(_depend_on(x, weight), x.dtype))


def _quantized_backward(weight: Nf4, gradient: Array) -> tuple[Array, None]:
    matrix = dequantize_nf4(_depend_on(gradient, weight), gradient.dtype)
    return dense_linear(gradient, matrix.T), None


def _depend_on(x: Array, weight: Nf4) -> Nf4:
    """Returns the same weight, which the compiler cannot dequantize before x is computed.

    Otherwise it dequantizes all layers up front, or keeps the dequantized weights from the forward to the backward
    pass, which needs as much memory as a model in full precision. XLA's CPU backend looks through an optimization
    barrier; there the weight's bits become a function of x, which elsewhere would copy them in memory.
    """
    if traced_platform() != "cpu":
        return lax.optimization_barrier((x, weight))[1]
    return replace(weight, codes=weight.codes ^ (x.reshape(-1)[0] * 0.0).astype(jnp.uint8))


_quantized_linear.defvjp(lambda x, weight: (_quantized_linear(x, weight), weight), _quantized_backward)


def vocabulary_logits(
    hidden: Float[Array, "*M D"], head: Float[Array, "V D"], softcap: float | None = None
) -> Float[Array, "*M V"]:
    """Computes the logits in float32, with an optional softcap."""
    product = matmul_nt(hidden.reshape(-1, hidden.shape[-1]), head)
    return softcapped(product.reshape(*hidden.shape[:-1], -1), softcap)


def gated_activation(
    activation: GatedActivation, gate: Float[Array, "*M F"], up: Float[Array, "*M F"] | None
) -> Float[Array, "*M F"]:
    """Computes activation(gate) * up, an activation of both, or activation(gate) if there is no other factor.

    In lower precision it is rounded once.
    """
    return _gated(activation, gate, up) if gate.dtype == jnp.float32 else _gated_low_precision(activation, gate, up)


def _gated(activation: GatedActivation, gate: Array, up: Array | None) -> Float[Array, "*M F"]:
    if not isinstance(activation, ClampedSwiglu):
        return ACTIVATIONS[activation](gate) if up is None else ACTIVATIONS[activation](gate) * up
    assert up is not None, "no family clamps an activation that is no gate"
    limit = np.float32(activation.limit)
    gate = jnp.minimum(gate, limit)
    return (jnp.clip(up, -limit, limit) + 1.0) * gate * jax.nn.sigmoid(gate * np.float32(activation.alpha))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_low_precision(activation: GatedActivation, gate: Array, up: Array | None) -> Array:
    return _gated_float32(activation, gate, up).astype(gate.dtype)


def _gated_float32(activation: GatedActivation, gate: Array, up: Array | None) -> Float[Array, "*M F"]:
    return _gated(activation, *jax.tree.map(lambda x: x.astype(jnp.float32), (gate, up)))


def _gated_backward(
    activation: GatedActivation, factors: tuple[Array, Array | None], cotangent: Array
) -> tuple[Array, Array | None]:
    """Recomputes from the factors alone, as a function of the cotangent, so that XLA keeps no float32 intermediates."""
    gate, up = factors
    gate = _depending_on(cotangent, gate)
    return jax.vjp(partial(_gated_float32, activation), gate, up)[1](cotangent.astype(jnp.float32))


_gated_low_precision.defvjp(
    lambda activation, *factors: (_gated_low_precision(activation, *factors), factors), _gated_backward
)


def mlp(
    x: Float[Array, "*M D"],
    gate: Weight | None,
    up: Weight,
    down: Weight,
    biases: tuple[Array | None, Array | None, Array | None],
    activation: GatedActivation = "silu",
    axis: Axis = None,
) -> Float[Array, "*M D"]:
    """Computes down(activation(gate x) * up x), or down(activation(up x)) if there is no gate.

    With a gate and "silu" this is SwiGLU (arXiv:2002.05202, without its constant). With an axis, inside a shard_map,
    the F dim is sharded over it.
    """
    gate_bias, up_bias, down_bias = biases
    x = psum_grad(x, axis)
    if gate is None:
        between = gated_activation(activation, linear(x, up, up_bias), None)
    else:
        between = gated_activation(activation, linear(x, gate, gate_bias), linear(x, up, up_bias))
    return row_parallel_linear(between, down, down_bias, axis)


@jax.custom_vjp
def lookup(table: Float[Array, "V ..."], index: Int[Array, "M"]) -> Float[Array, "M ..."]:
    """Returns table[index].

    The backward pass accumulates the gradient of each row in float32 and rounds the sum once. In bfloat16 a sum stops
    growing after some hundreds of terms.
    """
    return table[index]


def _backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    index, like = saved
    total = jnp.zeros((like.shape[0], *gradient.shape[1:]), jnp.float32).at[index].add(gradient.astype(jnp.float32))
    return total.astype(like.dtype), None


lookup.defvjp(lambda table, index: (table[index], (index, jnp.zeros((*table.shape[:1], 0), table.dtype))), _backward)


@jax.custom_vjp
def gather_with_inverse(x: Array, index: Array, inverse: Array) -> Array:
    """Returns x[index], with zeros where the index is -1. No item may be named twice.

    Args:
        x: Items along the first dim.
        index: Item of each output cell, or -1.
        inverse: Cell of each item in the flattened output, or -1. The backward pass gathers by it, which is far cheaper
            than a scatter-add.
    """
    del inverse
    return x.at[jnp.where(index < 0, x.shape[0], index)].get(mode="fill", fill_value=0)


def _gather_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    index, inverse = saved
    # without the barrier, XLA would recompute the sum of several tiles' gradients for each gathered item
    flat = jax.lax.optimization_barrier(gradient.reshape(index.size, *gradient.shape[index.ndim :]))
    return gather_with_inverse(flat, inverse, index.reshape(-1)), None, None


gather_with_inverse.defvjp(
    lambda x, index, inverse: (gather_with_inverse(x, index, inverse), (index, inverse)), _gather_backward
)
