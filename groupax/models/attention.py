"""Scaled dot-product attention for sequences, shared prompts and decoding. N query heads share K key/value heads.

Scores and their softmax are float32 whatever the dtype of the inputs. Keys are laid out as [.., H, S] and values as
[.., S, H], so that both products are plain matmuls over the columns S. Masked columns get a weight of exactly 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from groupax.models.config import AttentionConfig, Chunks, Window
from groupax.models.layers import scaled, softcapped
from groupax.models.matmul import matmul
from groupax.parallel.collectives import Axis, all_gather, all_to_all, axis_index, axis_size, local_slice
from groupax.parallel.mesh import Layout
from groupax.parallel.pytree import pytree

# Queries beyond this column are computed in blocks of `QUERY_BLOCK`, to bound the memory of the scores.
MAX_UNBLOCKED_COLUMNS = 1024
QUERY_BLOCK = 512
MASKED = -1e30  # not -inf, because a query without any visible key must give finite numbers, not NaN


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    starts: Int[Array, "B"],
    attn: AttentionConfig,
    blocks: Int[Array, "B T"] | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Computes causal attention, softmax(scale q kᵀ) v, over left-padded rows.

    Each query sees its own position and those before it, from its row's start. With a window it sees only the nearest
    of these. A query before its row's start sees nothing and gets the mean of all values.

    Args:
        starts: First column of each row.
        blocks: Image of each column (`vision.placement.image_blocks`), -1 for text, of a model that sees whole images:
            the columns of an image see each other.
        sinks: Logit of each head that adds to the sum of its softmax, without a value; None for none.
    """
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    columns = jnp.arange(k.shape[1])[None, None, :]

    def attend_block(first: Array | int, q: Array) -> Array:
        position = first + jnp.arange(q.shape[1])
        visible = columns <= position[None, :, None]
        if blocks is not None:
            own = blocks.at[:, position].get(mode="fill", fill_value=-1)  # the last block's queries may be padding
            visible = visible | same_image(own, blocks)
        visible = (columns >= starts[:, None, None]) & visible
        distance, in_row = position[None, :, None] - columns, position[None, :, None] - starts[:, None, None]
        visible = visible & within_window(distance, in_row, attn.window)
        return attend_masked(q, keys, values, visible, attn, sinks=sinks)

    return _map_query_blocks(attend_block, q)


def _map_query_blocks(
    attend_block: Callable[[Array | int, Array], Array], q: Float[Array, "B T N H"], first: int = 0
) -> Array:
    """Applies attend_block(first, q) to all queries, the first of which is in column `first`; in blocks in long rows.

    The backward pass recomputes each block, so that memory grows linearly with a row's length.
    """
    B, T, N, H = q.shape
    if first + T <= MAX_UNBLOCKED_COLUMNS:
        return attend_block(first, q)
    size = min(QUERY_BLOCK, T)
    num_blocks = -(-T // size)
    padded = jnp.pad(q, ((0, 0), (0, num_blocks * size - T), (0, 0), (0, 0)))
    blocks = padded.reshape(B, num_blocks, size, N, H).swapaxes(0, 1)
    firsts = first + jnp.arange(num_blocks) * size
    out = lax.map(jax.checkpoint(lambda xs: attend_block(*xs)), (firsts, blocks))
    return out.swapaxes(0, 1).reshape(B, num_blocks * size, N, H)[:, :T]


def attend_masked(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K H S"],
    values: Float[Array, "B K S H"],
    visible: Bool[Array, "B T S"],
    attn: AttentionConfig,
    by_block: bool = False,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Computes attention with an explicit mask, over keys and values in the cache's layout and dtype.

    Args:
        q, keys, values: The queries, and the keys and values of S columns.
        visible: Columns that each query sees.
        by_block: Whether to compute by blocks of columns (see `COLUMN_BLOCK`).
        sinks: Logits of the heads that add to their sums (see `attend`).
    """
    B, T, N, H = q.shape
    K = keys.shape[1]
    blocked = (key_scores, weighted_values, total_weights)
    scores_of, values_of, sum_of = blocked if by_block else (matmul, matmul, _row_sum)
    keys, values = keys.astype(q.dtype), values.astype(q.dtype)
    grouped = scaled(q, attn.scale).reshape(B, T, K, N // K, H)
    by_head = grouped.transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
    scores = softcapped(scores_of(by_head, keys).reshape(B, K, N // K, T, -1), attn.softcap)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    highest, sink = with_sinks(_row_max(scores), sinks)
    weights = jnp.exp(scores - highest)
    by_head = weights.reshape(B, K, -1, keys.shape[3])
    total = sum_of(by_head)
    total = total if sink is None else total + sink.reshape(total.shape)
    out = values_of(by_head.astype(q.dtype), values) / total
    out = out.reshape(B, K, N // K, T, H)
    return out.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


class Prompts(NamedTuple):
    """The keys and values of each row's left-padded prompt, and the prompt's first column."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    starts: Int[Array, "B"]


def attend_with_prompt(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    prompts: Prompts,
    attn: AttentionConfig,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Computes attention for rows that continue a left-padded prompt.

    Each query sees its row's prompt and, causally, the row itself. The queries are those of the last T of the row's C
    columns. `sinks` are as in `attend`.
    """
    S, K, C = *prompts.k.shape[1:3], k.shape[1]
    prompt_visible = (jnp.arange(S)[None, :] >= prompts.starts[:, None])[:, None, None, None]
    prompt_keys, keys = (x.transpose(0, 2, 3, 1) for x in (prompts.k, k))
    prompt_values, values = (x.transpose(0, 2, 1, 3) for x in (prompts.v, v))

    def attend_block(first: Array | int, q: Array) -> Array:
        B, t, N, H = q.shape
        grouped = scaled(q, attn.scale).reshape(B, t, K, N // K, H)
        position = first + jnp.arange(t)[:, None]
        in_row = S + position[None, None, None] - prompts.starts[:, None, None, None, None]
        to_prompt, to_row = S + position - jnp.arange(S)[None, :], position - jnp.arange(C)[None, :]
        to_prompt, to_row = to_prompt[None, None, None], to_row[None, None, None]
        row_seen = (to_row >= 0) & within_window(to_row, in_row, attn.window)
        prompt_seen = prompt_visible & within_window(to_prompt, in_row, attn.window)
        prompt_scores, row_scores = (
            jnp.where(visible, softcapped(_scores(grouped, keys), attn.softcap), MASKED)
            for visible, keys in ((prompt_seen, prompt_keys), (row_seen, keys))
        )
        highest, sink = with_sinks(jnp.maximum(_row_max(prompt_scores), _row_max(row_scores)), sinks)
        prompt_weights, row_weights = jnp.exp(prompt_scores - highest), jnp.exp(row_scores - highest)
        prompt_out, row_out = (
            _weighted_values(weights.astype(q.dtype), values)
            for weights, values in ((prompt_weights, prompt_values), (row_weights, values))
        )
        total = _row_sum(prompt_weights) + _row_sum(row_weights)
        out = (prompt_out + row_out) / (total if sink is None else total + sink)
        return out.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(B, t, N, H)

    return _map_query_blocks(attend_block, q, C - q.shape[1])


def same_image(queries: Int[Array, "*M T"], keys: Int[Array, "*M S"]) -> Bool[Array, "*M T S"]:
    """Checks whether a query and a key are tokens of the same image, which see each other if a model sees whole images.

    It widens a causal mask before `within_window` narrows it, which never excludes later positions. The keys of an
    image must all be computed with its first query, so that it cannot be split over several calls.

    Args:
        queries, keys: Image of each query and key (`vision.placement.image_blocks`); -1 for text.
    """
    return (queries[..., :, None] == keys[..., None, :]) & (queries[..., :, None] >= 0)


def attend_to_shown(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    shown: Bool[Array, "B T"],
    attn: AttentionConfig,
) -> Float[Array, "B T N H"]:
    """Computes attention of all queries to all keys that are shown, in both directions."""
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)

    def attend_block(first: Array | int, q: Array) -> Array:
        del first
        visible = jnp.broadcast_to(shown[:, None], (*q.shape[:2], shown.shape[1]))
        return attend_masked(q, keys, values, visible, attn)

    return _map_query_blocks(attend_block, q)


def within_window(
    distance: Int[Array, "*M S"], position: Int[Array, "*N 1"], window: Window
) -> Bool[Array, "*L S"] | bool:
    """Checks whether a position at this distance before the query, whose own position is given, is in its window."""
    if isinstance(window, Chunks):
        return distance <= position % window.size
    return True if window is None else distance < window


def with_sinks(
    highest: Float[Array, "B K G *T 1"], sinks: Float[Array, "N"] | None
) -> tuple[Float[Array, "B K G *T 1"], Float[Array, "B K G *T 1"] | None]:
    """Returns the highest logits with those of sinks among them, and what the sinks add to the sums of exponentials."""
    if sinks is None:
        return highest, None
    logits = sinks.astype(jnp.float32).reshape(1, *highest.shape[1:3], *(1,) * (highest.ndim - 3))
    highest = jnp.maximum(highest, lax.stop_gradient(logits))
    return highest, jnp.exp(logits - highest)


def _row_max(scores: Float[Array, "*M S"]) -> Float[Array, "*M 1"]:
    return lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))


def _row_sum(weights: Float[Array, "*M S"]) -> Float[Array, "*M 1"]:
    return jnp.sum(weights, axis=-1, keepdims=True)


def _scores(q: Float[Array, "B T K G H"], keys: Float[Array, "B K H S"]) -> Float[Array, "B K G T S"]:
    """Computes q keys in float32."""
    B, T, K, G, H = q.shape
    by_head = q.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    return matmul(by_head, keys).reshape(B, K, G, T, -1)


def _weighted_values(weights: Float[Array, "B K G T S"], values: Float[Array, "B K S H"]) -> Float[Array, "B K G T H"]:
    """Computes the weighted sum of the values in float32."""
    B, K, G, T, S = weights.shape
    return matmul(weights.reshape(B, K, G * T, S), values).reshape(B, K, G, T, -1)


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

    With `by_block` it computes by blocks of columns (see `COLUMN_BLOCK`); `sinks` are as in `attention.attend`.
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


# Products over a cache's columns are computed by blocks. A processor adds up a product in an order that depends on its
# shape, so that with blocks of one size, added one after the other, further columns that are masked change no bit.
COLUMN_BLOCK = 128


def key_scores(q: Float[Array, "*B M H"], keys: Float[Array, "*B H S"]) -> Float[Array, "*B M S"]:
    """Computes q keys in float32; in one product if S is not a multiple of a block."""
    S = keys.shape[-1]
    if S % COLUMN_BLOCK:
        return matmul(q, keys)
    blocks = (keys[..., first : first + COLUMN_BLOCK] for first in range(0, S, COLUMN_BLOCK))
    return jnp.concatenate([matmul(q, block) for block in blocks], axis=-1)


def weighted_values(weights: Float[Array, "*B M S"], values: Float[Array, "*B S H"]) -> Float[Array, "*B M H"]:
    """Computes the weighted sum of values in float32; in one product if S is not a multiple of a block."""
    *lead, M, S = weights.shape
    if S % COLUMN_BLOCK or S == COLUMN_BLOCK:
        return matmul(weights, values)
    by_block = weights.reshape(*lead, M, S // COLUMN_BLOCK, COLUMN_BLOCK).swapaxes(-3, -2)
    return jnp.sum(matmul(by_block, values.reshape(*lead, S // COLUMN_BLOCK, COLUMN_BLOCK, values.shape[-1])), axis=-3)


def total_weights(weights: Float[Array, "*B M S"]) -> Float[Array, "*B M 1"]:
    """Computes the sum of weights in float32, as that of the values 1."""
    *lead, _, S = weights.shape
    return weighted_values(weights, jnp.ones((*lead, S, 1), weights.dtype))


def local_kv_heads(x: Float[Array, "M K H"], num_own: int, axis: Axis) -> Float[Array, "M k H"]:
    """Returns the key/value heads that a device's query heads use.

    Args:
        x: Heads of all devices of the axis.
        num_own: Number of query heads per device.
        axis: Mesh axis over which the query heads are sharded.
    """
    K = x.shape[1]
    per_kv_head = num_own * axis_size(axis) // K
    first = axis_index(axis) * num_own
    if num_own % per_kv_head and per_kv_head % num_own:
        return x[:, (first + jnp.arange(num_own)) // per_kv_head]
    return lax.dynamic_slice_in_dim(x, first // per_kv_head, max(1, num_own // per_kv_head), 1)


def local_tokens(x: Shaped[Array, "M ..."], layout: Layout) -> Shaped[Array, "m ..."]:
    """Returns a device's share of something that all devices have for each token, padded to shares of equal size."""
    axis = layout.axis("tokens")
    if axis is None:
        return x
    unused = -x.shape[0] % axis_size(axis)
    return local_slice(jnp.pad(x, ((0, unused), *((0, 0),) * (x.ndim - 1))), axis, 0)


def attend_by_heads(
    attend_all: Callable[[Array, Array, Array, Array | None], Array],
    num_tokens: int,
    layout: Layout,
    q: Float[Array, "m N H"],
    k: Float[Array, "m K H"],
    v: Float[Array, "m K H"],
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "m N H"]:
    """Computes attention over all tokens; if devices share them, each computes some heads (arXiv:2309.14509).

    Args:
        attend_all: Attention over all tokens, with any number of heads: (queries, keys, values, sinks) -> outputs.
        num_tokens: Number of all tokens, without the padding of `local_tokens`.
    """
    axis = layout.axis("tokens")
    if axis is None:
        return attend_all(q, k, v, sinks)
    q = all_to_all(q, axis, 1, 0)
    if k.shape[1] % axis_size(axis) == 0:
        k, v = all_to_all(k, axis, 1, 0), all_to_all(v, axis, 1, 0)
    else:
        k, v = (local_kv_heads(all_gather(x, axis, 0), q.shape[1], axis) for x in (k, v))
    sinks = None if sinks is None else local_slice(sinks, axis, 0)
    out = attend_all(q[:num_tokens], k[:num_tokens], v[:num_tokens], sinks)
    out = jnp.pad(out, ((0, q.shape[0] - num_tokens), (0, 0), (0, 0)))
    return all_to_all(out, axis, 0, 1)
