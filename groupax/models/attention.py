"""Scaled dot-product attention over the layouts of this code base. N query heads share K key/value heads.

Scores and their softmax are float32 whatever the inputs are. Decoding and training multiply the same layouts (keys
[.., H, S], values [.., S, H]) and add up the weights as a matrix product, so that on CPU a token's output has the
same bits in both: hidden columns weigh exactly 0, and a sequence's columns lie without a gap, its prompt ending at a
multiple of 8.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from groupax.models.layers import einsum_f32, sum_last

MASKED = -1e30  # not -inf: a query without any visible key must give finite numbers, not NaN


def attend(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], visible: Bool[Array, "B T S"]
) -> Float[Array, "B T N H"]:
    """softmax(q k' / sqrt(H)) v over the visible keys; a query that sees none gets the mean of all values."""
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H) * jnp.asarray(H**-0.5, q.dtype)
    keys, values = _row_major(k.transpose(0, 2, 3, 1)), _row_major(v.transpose(0, 2, 1, 3))
    scores = einsum_f32("btkgh,bkhs->bkgts", grouped, keys)
    weights, inverse_sum = _softmax_terms(jnp.where(visible[:, None, None], scores, MASKED))
    out = einsum_f32("bkgts,bksh->bkgth", weights.astype(v.dtype), values)
    out = out * inverse_sum
    return out.astype(v.dtype).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def causal(length: int) -> Bool[Array, "1 T T"]:
    """Each query sees its own position and those before it."""
    positions = jnp.arange(length)
    return (positions[:, None] >= positions[None, :])[None]


def causal_from(starts: Int[Array, "P"], length: int) -> Bool[Array, "P S S"]:
    """Each query sees its own position and those before it, from the row's start on."""
    return causal(length) & (jnp.arange(length)[None, None, :] >= starts[:, None, None])


def attend_with_prompt(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    prompt_k: Float[Array, "B S K H"],
    prompt_v: Float[Array, "B S K H"],
    prompt_starts: Int[Array, "B"],
) -> Float[Array, "B T N H"]:
    """Rows that continue a left-padded prompt: each query sees the row's prompt and, causally, the row itself."""
    B, T = q.shape[:2]
    S = prompt_k.shape[1]
    sees_prompt = jnp.arange(S)[None, None, :] >= prompt_starts[:, None, None]
    visible = jnp.concatenate(
        [jnp.broadcast_to(sees_prompt, (B, T, S)), jnp.broadcast_to(causal(T), (B, T, T))], axis=-1
    )
    return attend(q, jnp.concatenate([prompt_k, k], axis=1), jnp.concatenate([prompt_v, v], axis=1), visible)


def attend_cached(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H S"],
    v: Float[Array, "B K S H"],
    visible: Bool[Array, "B S"],
) -> Float[Array, "B N H"]:
    """One query per row over the row's visible cache columns."""
    B, N, H = q.shape
    K = k.shape[1]
    grouped = q.reshape(B, K, N // K, H) * jnp.asarray(H**-0.5, q.dtype)
    scores = einsum_f32("bkgh,bkhs->bkgs", grouped, k)
    weights, inverse_sum = _softmax_terms(jnp.where(visible[:, None, None], scores, MASKED))
    out = einsum_f32("bkgs,bksh->bkgh", weights.astype(v.dtype), v)
    return (out * inverse_sum).astype(v.dtype).reshape(B, N, H)


def _row_major(x: Float[Array, "B K S H"]) -> Float[Array, "B K S H"]:
    """Keep the compiler from undoing a transposition, which would multiply the operands in another order."""
    return with_layout_constraint(x, Layout(major_to_minor=(0, 1, 2, 3)))


def _softmax_terms(scores: Float[Array, "*M S"]) -> tuple[Float[Array, "*M S"], Float[Array, "*M 1"]]:
    """Weights before normalization, and what to multiply them by.

    A division by the sum would be compiled as such or as a product with its inverse, depending on its surroundings.
    """
    weights = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    return weights, 1.0 / sum_last(weights)
