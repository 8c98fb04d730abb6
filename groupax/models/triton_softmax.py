"""Parts of Triton kernels for attention: a softmax over blocks of columns, and over parts of them.

The softmax is rescaled as its maximum grows (arXiv:1805.02867), so that scores never reach the device's memory. Tiles
are padded to powers of two; loads and stores are masked.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from groupax.models.attention import MASKED
from groupax.models.config import AttentionConfig
from groupax.models.layers import softcapped

GRANULE = 16  # columns of keys that are loaded together, as vectors


class Softmax(NamedTuple):
    """A softmax-weighted sum of values so far, before the division by `total`, and the highest score."""

    out: Float[Array, "M H"]
    total: Float[Array, "M"]
    highest: Float[Array, "M"]


def no_columns(num_queries: int, dims: int) -> Softmax:
    """Returns the softmax over no columns."""
    zeros = jnp.zeros(num_queries, jnp.float32)
    return Softmax(jnp.zeros((num_queries, dims), jnp.float32), zeros, zeros + MASKED)


def one_column(attn: AttentionConfig, queries: Array, key: Array, value: Array) -> Softmax:
    """Returns the softmax over one column, which all queries see: key [H], value [H]."""
    scores = jnp.sum(queries.astype(jnp.float32) * key.astype(jnp.float32)[None, :], axis=1) * attn.scale
    scores = softcapped(scores, attn.softcap)
    out = jnp.broadcast_to(value.astype(jnp.float32)[None, :], queries.shape)
    return Softmax(out, jnp.ones_like(scores), scores)


def add_columns(
    attn: AttentionConfig, softmax: Softmax, queries: Array, keys: Array, values: Array, visible: Array
) -> Softmax:
    """Adds a block of columns: keys [H, C], values [C, H], visible [M or 1, C]."""
    scores = jnp.dot(queries, keys.astype(queries.dtype), preferred_element_type=jnp.float32) * attn.scale
    scores = jnp.where(visible, softcapped(scores, attn.softcap), MASKED)
    highest = jnp.maximum(softmax.highest, jnp.max(scores, axis=1))
    weights = jnp.where(visible, jnp.exp(scores - highest[:, None]), 0.0)
    kept = jnp.exp(softmax.highest - highest)
    out = jnp.dot(weights.astype(queries.dtype), values.astype(queries.dtype), preferred_element_type=jnp.float32)
    return Softmax(softmax.out * kept[:, None] + out, softmax.total * kept + jnp.sum(weights, axis=1), highest)


def load_columns(
    keys: Any, values: Any, dim: Array, column: Array, begin: Array, end: Array | int
) -> tuple[Array, Array]:
    """Loads the keys and values of a block of columns, of which those from `begin` to before `end` are needed.

    The mask of the keys covers whole granules, so that it allows vectors of columns.
    """
    H, T = keys.shape
    granule = lax.div(column, GRANULE)
    loaded = (granule >= lax.div(begin, GRANULE)) & (granule <= lax.div(end - 1, GRANULE))
    if T % GRANULE:
        loaded = loaded & (column < T)
    needed = (column >= begin) & (column < end)
    return (
        triton.load(keys.at[dim[:, None], column[None, :]], mask=loaded[None, :] & (dim < H)[:, None], other=0.0),
        triton.load(values.at[column[:, None], dim[None, :]], mask=needed[:, None] & (dim < H)[None, :], other=0.0),
    )


def blocks_per_part(num_blocks: Array, num_parts: int) -> Array:
    """Returns the number of blocks in each of at most `num_parts` parts."""
    return jnp.maximum(lax.div(num_blocks + num_parts - 1, num_parts), 1)


def num_nonempty_parts(num_blocks: Array, num_parts: int) -> Array:
    """Returns how many of the parts have blocks."""
    per_part = blocks_per_part(num_blocks, num_parts)
    return lax.div(num_blocks + per_part - 1, per_part)


def add_parts(softmax: Softmax, out: Any, lse: Any, query: Array, is_query: Array, num_parts: Array) -> Softmax:
    """Adds the results that `write_part` wrote for the first parts, where `query` are the indices of the queries."""
    dim = jnp.arange(softmax.out.shape[1])
    mask = is_query[:, None] & (dim < out.shape[2])[None, :]

    def add_part(part: Array, softmax: Softmax) -> Softmax:
        part_lse = triton.load(lse.at[part, query], mask=is_query, other=MASKED)
        part_out = triton.load(out.at[part, query[:, None], dim[None, :]], mask=mask, other=0.0)
        highest = jnp.maximum(softmax.highest, part_lse)
        kept, weight = jnp.exp(softmax.highest - highest), jnp.exp(part_lse - highest)
        merged = softmax.out * kept[:, None] + part_out * weight[:, None]
        return Softmax(merged, softmax.total * kept + weight, highest)

    return lax.fori_loop(jnp.int32(0), num_parts, add_part, softmax)


def write_part(softmax: Softmax, out: Any, lse: Any, part: Array, query: Array, is_query: Array) -> None:
    """Writes the result of a part and the logarithm of its softmax's sum."""
    dim = jnp.arange(softmax.out.shape[1])
    total = jnp.maximum(softmax.total, jnp.finfo(jnp.float32).tiny)  # 0 where a window hides the whole part
    mask = is_query[:, None] & (dim < out.shape[2])[None, :]
    triton.store(out.at[part, query[:, None], dim[None, :]], softmax.out / total[:, None], mask=mask)
    triton.store(lse.at[part, query], softmax.highest + jnp.log(total), mask=is_query)
