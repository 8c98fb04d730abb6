"""Latent attention (arXiv:2405.04434, section 2.1), in two forms that agree up to rounding.

Without a cache each head's keys and values are computed from the latent vectors. With one, the cache has the latent
vectors and the keys that all heads share, as one head of keys; its values are the latent vectors, padded. The matrices
that would have made keys and values of them are multiplied with the queries and the outputs instead.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from groupax.models.adapted import AdaptedWeight, row_factors
from groupax.models.config import LatentAttention
from groupax.models.layers import Weight, linear, norm, row_parallel_linear
from groupax.models.specs import Params
from groupax.parallel.collectives import Axis, psum_grad

# queries, keys, values -> (outputs, the layer's updated cache)
BoundAttend = Callable[[Array, Array, Array], tuple[Array, Any]]


def latent_attention(
    latent: LatentAttention,
    weights: Params,
    h: Float[Array, "M D"],
    rotate: Callable[[Array], Array],
    attend: BoundAttend,
    is_cached: bool,
    axis: Axis,
) -> tuple[Float[Array, "M D"], Any]:
    """Computes latent attention of one layer.

    Args:
        rotate: Applies rotary embeddings to the dims of heads that have them.
        is_cached: Whether `attend` stores keys and values.
        axis: Mesh axis over which heads are sharded; None for none.

    Returns:
        The attention output of each token, and the layer's updated cache.
    """
    q = _queries(latent, weights, h, axis)
    q_plain, q_rope = q[..., : latent.plain_dims], rotate(q[..., latent.plain_dims :])
    compressed = linear(h, weights["kv_down"], weights.get("kv_down_bias"))
    c = norm(compressed[:, : latent.rank], weights["kv_latent_norm"], latent.norm_eps, "rms")
    k_rope = rotate(compressed[:, None, latent.rank :])
    c, k_rope = psum_grad(c, axis), psum_grad(k_rope, axis)
    kv_up = weights["kv_up"]
    if is_cached:
        q = jnp.concatenate([_through_keys(latent, kv_up, q_plain), q_rope], axis=-1)
        k = jnp.concatenate([c[:, None], k_rope], axis=-1)
        out, cache = attend(q, k, _padded(c[:, None], latent.cached_dims))
        out = _through_values(latent, kv_up, out[..., : latent.rank])
    else:
        kv = linear(c, kv_up).reshape(len(c), -1, latent.plain_dims + latent.value_dims)
        k_plain, v = kv[..., : latent.plain_dims], kv[..., latent.plain_dims :]
        k = jnp.concatenate([k_plain, jnp.broadcast_to(k_rope, (*k_plain.shape[:2], latent.rope_dims))], axis=-1)
        q = jnp.concatenate([q_plain, q_rope], axis=-1)
        out, cache = attend(*(_padded(x, latent.expanded_dims) for x in (q, k, v)))
        out = out[..., : latent.value_dims]
    return row_parallel_linear(out.reshape(len(h), -1), weights["o"], weights.get("o_bias"), axis), cache


def _queries(latent: LatentAttention, weights: Params, h: Float[Array, "M D"], axis: Axis) -> Float[Array, "M N H"]:
    if latent.query_rank is None:
        q = linear(psum_grad(h, axis), weights["q"])
    else:
        down = linear(h, weights["q_down"], weights.get("q_down_bias"))
        normed = norm(down, weights["q_latent_norm"], latent.norm_eps, "rms")
        q = linear(psum_grad(normed, axis), weights["q_up"])
    return q.reshape(len(h), -1, latent.plain_dims + latent.rope_dims)


def _through_keys(latent: LatentAttention, kv_up: Weight, q: Float[Array, "M N P"]) -> Float[Array, "M N C"]:
    """Multiplies queries with the matrix that would make keys of latent vectors."""
    if isinstance(kv_up, AdaptedWeight):
        if kv_up.norms is not None:
            factors = row_factors(kv_up).astype(q.dtype).reshape(1, q.shape[1], -1)
            q = q * factors[..., : latent.plain_dims]
        b = _by_head(latent, kv_up.change.b)[:, : latent.plain_dims]
        inner = jnp.einsum("mnp,npr->mnr", q, b) * _rank_scales(kv_up, q.dtype)
        return _through_keys(latent, kv_up.base, q) + jnp.einsum("mnr,rc->mnc", inner, kv_up.change.a)
    matrix = _by_head(latent, _dense(kv_up, latent.rank, q.dtype))
    return jnp.einsum("mnp,npc->mnc", q, matrix[:, : latent.plain_dims])


def _through_values(latent: LatentAttention, kv_up: Weight, x: Float[Array, "M N C"]) -> Float[Array, "M N V"]:
    """Applies the value up-projection to weighted sums of latent vectors."""
    if isinstance(kv_up, AdaptedWeight):
        b = _by_head(latent, kv_up.change.b)[:, latent.plain_dims :]
        inner = jnp.einsum("mnc,rc->mnr", x, kv_up.change.a) * _rank_scales(kv_up, x.dtype)
        out = _through_values(latent, kv_up.base, x) + jnp.einsum("mnr,nvr->mnv", inner, b)
        if kv_up.norms is None:
            return out
        return out * row_factors(kv_up).astype(x.dtype).reshape(1, x.shape[1], -1)[..., latent.plain_dims :]
    matrix = _by_head(latent, _dense(kv_up, latent.rank, x.dtype))
    return jnp.einsum("mnc,nvc->mnv", x, matrix[:, latent.plain_dims :])


def _rank_scales(weight: AdaptedWeight, dtype: Any) -> Float[Array, "..."]:
    """Returns the scale of each token's ranks: 0 for those of other adapters (see `adapted.low_rank_linear`)."""
    if weight.scales is None or weight.owner is None:
        return jnp.asarray(weight.change.scale, dtype)
    scales = jnp.asarray(weight.scales, dtype)
    assert weight.rows is not None, "several adapters need to know which one each row is for"
    return jnp.where(weight.rows[:, None] == weight.owner[None, :], scales[None, :], 0)[:, None]


def _by_head(latent: LatentAttention, matrix: Float[Array, "O I"]) -> Float[Array, "N H I"]:
    return matrix.reshape(-1, latent.plain_dims + latent.value_dims, matrix.shape[1])


def _dense(weight: Weight, num_in: int, dtype: Any) -> Float[Array, "O I"]:
    """Returns a weight, which may be quantized, as one matrix."""
    return weight if isinstance(weight, Array) else linear(jnp.eye(num_in, dtype=dtype), weight).T


def _padded(x: Float[Array, "M n _"], dims: int) -> Float[Array, "M n H"]:
    return x if x.shape[-1] == dims else jnp.pad(x, ((0, 0), (0, 0), (0, dims - x.shape[-1])))
