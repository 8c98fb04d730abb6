"""Attention while decoding: one query per row over the cache of its prompt and of its own tokens.

A row's own tokens have its first columns, in their order, so that a row is computed alike whenever it started.
`attend_past` defines the computation, and `models.fused_decode_attention` chooses between it and kernels that agree
with it.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from groupax.models.attention import MASKED, with_sinks, within_window
from groupax.models.column_blocks import key_scores, total_weights, weighted_values
from groupax.models.config import AttentionConfig, Window
from groupax.models.layers import scaled, softcapped
from groupax.models.matmul import matmul
from groupax.parallel.pytree import pytree


@pytree
class Past:
    """The columns of the cache that each row sees; B / Q adjacent rows share a prompt.

    Attributes:
        prompt_starts: First column of each right-aligned prompt; its number of columns S for an empty prompt.
        lengths: Number of own columns that each row sees, up to that of its newest token; 0 for an idle row, whose
            result is undefined but finite and whose columns stay as they are.
    """

    prompt_starts: Int[Array, "Q"]
    lengths: Int[Array, "B"]

    def visible(self, num_columns: int, num_prompt_columns: int = 0, window: Window = None) -> Bool[Array, "B T"]:
        """Returns which own columns each row sees, with a window only the newest ones."""
        distance = self.lengths[:, None] - 1 - jnp.arange(num_columns)[None, :]
        return (distance >= 0) & within_window(distance, self._positions(num_prompt_columns), window)

    def prompt_visible(self, num_columns: int, window: Window = None) -> Bool[Array, "Q S"] | Bool[Array, "B S"]:
        """Returns which columns of its prompt each row sees, with a window those that are near enough to the row."""
        columns = jnp.arange(num_columns)[None, :]
        visible = columns >= self.prompt_starts[:, None]
        if window is None:
            return visible
        distance = self.lengths[:, None] - 1 + num_columns - columns
        visible = jnp.repeat(visible, len(distance) // len(visible), axis=0)
        return visible & within_window(distance, self._positions(num_columns), window)

    def _positions(self, num_prompt_columns: int) -> Int[Array, "B 1"]:
        """Returns the position of each row's newest token in its sequence."""
        prompts = jnp.repeat(num_prompt_columns - self.prompt_starts, len(self.lengths) // len(self.prompt_starts))
        return (prompts + self.lengths - 1)[:, None]

    def write(self, x: Array, newest: Array, axis: int) -> Array:
        """Returns the rows' arrays `x`, whose columns are at `axis`, with the newest column of each busy row."""
        column = jnp.where(self.lengths > 0, self.lengths - 1, x.shape[axis])  # beyond the last one nothing is written
        index = (jnp.arange(len(x)), *[slice(None)] * (axis - 1), column)
        return x.at[index].set(newest, mode="drop", unique_indices=True, indices_are_sorted=True)


class LayerCache(NamedTuple):
    """The keys and values of a layer: of Q prompts, and of the B rows' own tokens."""

    prompt_k: Float[Array, "Q K H S"]
    prompt_v: Float[Array, "Q K S H"]
    k: Float[Array, "B K H T"]
    v: Float[Array, "B K T H"]


def to_cache(x: Float[Array, "*M"], dtype: Any) -> Float[Array, "*M"]:
    """Casts keys or values to the dtype of a cache. In float8, numbers beyond its range become its largest."""
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def attend_past(
    attn: AttentionConfig,
    past: Past,
    cache: LayerCache,
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    sinks: Float[Array, "N"] | None = None,
    by_block: bool = False,
) -> tuple[Float[Array, "B N H"], LayerCache]:
    """Writes the newest tokens' keys and values into the cache, and computes their queries' attention.

    With `by_block` it computes by blocks of columns (see `column_blocks`); `sinks` are as in `attention.attend`.
    """
    keys = past.write(cache.k, to_cache(k, cache.k.dtype), axis=3)
    cache = cache._replace(k=keys, v=past.write(cache.v, to_cache(v, cache.v.dtype), axis=2))
    return attend_cached(attn, past, cache, q, sinks, by_block), cache


def attend_cached(
    attn: AttentionConfig,
    past: Past,
    cache: LayerCache,
    q: Float[Array, "B N H"],
    sinks: Float[Array, "N"] | None = None,
    by_block: bool = False,
) -> Float[Array, "B N H"]:
    """Computes attention of one query per row over its prompt's and its own visible columns.

    The rows of a prompt are grouped into one matmul, so that its keys and values are read once for all of them.
    """
    B, N, H = q.shape
    Q, K, S, _ = cache.prompt_v.shape
    R, G = B // Q, N // K  # rows per prompt, query heads per kv head
    blocked = (key_scores, weighted_values, total_weights)
    scores_of, values_of, sum_of = blocked if by_block else (matmul, matmul, _row_sum)
    common = max(q.dtype, cache.k.dtype, key=lambda dtype: dtype.itemsize)  # the cache may have its own dtype
    prompt_k, prompt_v, keys, values = (x.astype(common) for x in cache)

    def to_prompts(x: Array) -> Array:  # [B, K, G, _] -> [Q, K, R G, _]
        return x.reshape(Q, R, K, G, -1).swapaxes(1, 2).reshape(Q, K, R * G, -1)

    def to_rows(x: Array) -> Array:  # [Q, K, R G, _] -> [B, K, G, _]
        return x.reshape(Q, K, R, G, -1).swapaxes(1, 2).reshape(B, K, G, -1)

    queries = scaled(q, attn.scale).reshape(B, K, G, H).astype(common)
    prompt_scores = softcapped(scores_of(to_prompts(queries), prompt_k), attn.softcap)
    prompt_visible = past.prompt_visible(S, attn.window)
    if len(prompt_visible) == Q:
        prompt_visible = prompt_visible[:, None, None]
    else:
        prompt_visible = jnp.repeat(prompt_visible.reshape(Q, 1, R, S), G, axis=2)
    prompt_scores = jnp.where(prompt_visible, prompt_scores, MASKED)
    row_scores = softcapped(scores_of(queries, keys), attn.softcap)
    visible = past.visible(values.shape[2], S, attn.window)
    row_scores = jnp.where(visible[:, None, None], row_scores, MASKED)
    highest, sink = with_sinks(jnp.maximum(to_rows(_row_max(prompt_scores)), _row_max(row_scores)), sinks)
    prompt_weights, row_weights = jnp.exp(prompt_scores - to_prompts(highest)), jnp.exp(row_scores - highest)
    prompt_out = values_of(prompt_weights.astype(values.dtype), prompt_v)
    row_out = values_of(row_weights.astype(values.dtype), values)
    total = to_rows(sum_of(prompt_weights)) + sum_of(row_weights)
    out = (to_rows(prompt_out) + row_out) / (total if sink is None else total + sink)
    return out.astype(q.dtype).reshape(B, N, H)


def _row_max(scores: Float[Array, "*M S"]) -> Float[Array, "*M 1"]:
    return jnp.max(scores, axis=-1, keepdims=True)


def _row_sum(weights: Float[Array, "*M S"]) -> Float[Array, "*M 1"]:
    return jnp.sum(weights, axis=-1, keepdims=True)
