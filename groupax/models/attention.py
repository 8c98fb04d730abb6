"""Scaled dot-product attention over the layouts of this code base. N query heads share K key/value heads.

Scores and their softmax are float32 whatever the dtype of the inputs is. Keys are laid out [.., H, S] and values
[.., S, H], so that both products are plain matrix products over the columns S. Hidden columns weigh exactly 0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from groupax.models.config import AttentionConfig
from groupax.models.layers import scaled, softcapped
from groupax.models.matmul import matmul

# Queries that reach beyond so many columns are taken in blocks of so many.
MAX_UNBLOCKED_COLUMNS = 1024
QUERY_BLOCK = 512
MASKED = -1e30  # not -inf: a query without any visible key must give finite numbers, not NaN


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    starts: Int[Array, "B"],
    attn: AttentionConfig,
) -> Float[Array, "B T N H"]:
    """softmax(scale q k') v, where each query sees its own position and those before it, from `starts` on.

    A query before its row's start sees nothing and gets the mean of all values. With a window, of the positions before
    it the query sees the nearest only.
    """
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    columns = jnp.arange(k.shape[1])[None, None, :]

    def of_block(first: Array | int, q: Array) -> Array:
        own = first + jnp.arange(q.shape[1])
        visible = (columns >= starts[:, None, None]) & (columns <= own[None, :, None])
        visible = visible & within_window(own[None, :, None] - columns, attn.window)
        return attend_masked(q, keys, values, visible, attn)

    return _in_blocks(of_block, q)


def _in_blocks(of_block: Callable[[Array | int, Array], Array], q: Float[Array, "B T N H"], first: int = 0) -> Array:
    """of_block(first, q) of all queries from column `first` on; in long rows block by block.

    The backward pass computes a block again, so that memory grows with a row's length and not with its square.
    """
    B, T, N, H = q.shape
    if first + T <= MAX_UNBLOCKED_COLUMNS:
        return of_block(first, q)
    size = min(QUERY_BLOCK, T)
    num_blocks = -(-T // size)
    padded = jnp.pad(q, ((0, 0), (0, num_blocks * size - T), (0, 0), (0, 0)))
    blocks = padded.reshape(B, num_blocks, size, N, H).swapaxes(0, 1)
    firsts = first + jnp.arange(num_blocks) * size
    out = lax.map(jax.checkpoint(lambda xs: of_block(*xs)), (firsts, blocks))
    return out.swapaxes(0, 1).reshape(B, num_blocks * size, N, H)[:, :T]


def attend_masked(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K H S"],
    values: Float[Array, "B K S H"],
    visible: Bool[Array, "B T S"],
    attn: AttentionConfig,
) -> Float[Array, "B T N H"]:
    """`attend` with keys and values as the cache has them, maybe in another dtype."""
    B, T, N, H = q.shape
    K = keys.shape[1]
    keys, values = keys.astype(q.dtype), values.astype(q.dtype)
    grouped = scaled(q, attn.scale).reshape(B, T, K, N // K, H)
    scores = jnp.where(visible[:, None, None], softcapped(_scores(grouped, keys), attn.softcap), MASKED)
    weights = jnp.exp(scores - _highest(scores))
    out = _weighted(weights.astype(q.dtype), values) / _total(weights)
    return out.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def attend_with_prompt(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    prompt_k: Float[Array, "B S K H"],
    prompt_v: Float[Array, "B S K H"],
    prompt_starts: Int[Array, "B"],
    attn: AttentionConfig,
) -> Float[Array, "B T N H"]:
    """Rows that continue a left-padded prompt: each query sees the row's prompt and, causally, the row itself.

    The queries are those of the row's last T columns of C.
    """
    S, K, C = *prompt_k.shape[1:3], k.shape[1]
    prompt_visible = (jnp.arange(S)[None, :] >= prompt_starts[:, None])[:, None, None, None]
    prompt_keys, keys = (x.transpose(0, 2, 3, 1) for x in (prompt_k, k))
    prompt_values, values = (x.transpose(0, 2, 1, 3) for x in (prompt_v, v))

    def of_block(first: Array | int, q: Array) -> Array:
        B, t, N, H = q.shape
        grouped = scaled(q, attn.scale).reshape(B, t, K, N // K, H)
        own = first + jnp.arange(t)[:, None]
        behind, behind_row = S + own - jnp.arange(S)[None, :], own - jnp.arange(C)[None, :]
        row_visible = (behind_row >= 0) & within_window(behind_row, attn.window)
        prompt_seen = prompt_visible & within_window(behind[None, None, None], attn.window)
        on_prompt, on_row = (
            jnp.where(visible, softcapped(_scores(grouped, keys), attn.softcap), MASKED)
            for visible, keys in ((prompt_seen, prompt_keys), (row_visible[None, None, None], keys))
        )
        highest = jnp.maximum(_highest(on_prompt), _highest(on_row))
        prompt_weights, row_weights = jnp.exp(on_prompt - highest), jnp.exp(on_row - highest)
        of_prompt, of_row = (
            _weighted(weights.astype(q.dtype), values)
            for weights, values in ((prompt_weights, prompt_values), (row_weights, values))
        )
        out = (of_prompt + of_row) / (_total(prompt_weights) + _total(row_weights))
        return out.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(B, t, N, H)

    return _in_blocks(of_block, q, C - q.shape[1])


def attend_cached(
    q: Float[Array, "B N H"],
    prompt_k: Float[Array, "Q K H S"],
    prompt_v: Float[Array, "Q K S H"],
    prompt_visible: Bool[Array, "Q S"] | Bool[Array, "B S"],
    k: Float[Array, "B K H T"],
    v: Float[Array, "B K T H"],
    visible: Bool[Array, "B T"],
    attn: AttentionConfig,
) -> Float[Array, "B N H"]:
    """One query per row over its prompt's and its own visible columns; B / Q neighbouring rows share a prompt.

    The rows of a prompt multiply its keys and values together, so that these are read once for all of them. What of the
    prompt is visible may differ from row to row.
    """
    B, N, H = q.shape
    Q, K = prompt_k.shape[:2]
    R, G = B // Q, N // K  # rows per prompt, query heads per key head
    common = max(q.dtype, k.dtype, key=lambda dtype: dtype.itemsize)  # the cache may have its own
    prompt_k, prompt_v, k, v = (x.astype(common) for x in (prompt_k, prompt_v, k, v))

    def by_prompt(x: Array) -> Array:
        return x.reshape(Q, R, K, G, -1).swapaxes(1, 2).reshape(Q, K, R * G, -1)

    def by_row(x: Array) -> Array:
        return x.reshape(Q, K, R, G, -1).swapaxes(1, 2).reshape(B, K, G, -1)

    grouped = scaled(q, attn.scale).reshape(B, K, G, H).astype(common)
    on_prompt = softcapped(matmul(by_prompt(grouped), prompt_k), attn.softcap)
    if prompt_visible.shape[0] == Q:
        prompt_visible = prompt_visible[:, None, None]
    else:
        prompt_visible = jnp.repeat(prompt_visible.reshape(Q, 1, R, -1), G, axis=2)
    on_prompt = jnp.where(prompt_visible, on_prompt, MASKED)
    on_row = softcapped(matmul(grouped, k), attn.softcap)
    on_row = jnp.where(visible[:, None, None], on_row, MASKED)
    highest = jnp.maximum(by_row(_highest(on_prompt)), _highest(on_row))
    prompt_weights, row_weights = jnp.exp(on_prompt - by_prompt(highest)), jnp.exp(on_row - highest)
    of_prompt = matmul(prompt_weights.astype(v.dtype), prompt_v)
    of_row = matmul(row_weights.astype(v.dtype), v)
    out = (by_row(of_prompt) + of_row) / (by_row(_total(prompt_weights)) + _total(row_weights))
    return out.astype(q.dtype).reshape(B, N, H)


def within_window(behind: Int[Array, "*M S"], window: int | None) -> Bool[Array, "*M S"] | bool:
    """Whether a position so far behind a query's own is in its window."""
    return True if window is None else behind < window


def _highest(scores: Float[Array, "*M S"]) -> Float[Array, "*M 1"]:
    return lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))


def _total(weights: Float[Array, "*M S"]) -> Float[Array, "*M 1"]:
    return jnp.sum(weights, axis=-1, keepdims=True)


def _scores(q: Float[Array, "B T K G H"], keys: Float[Array, "B K H S"]) -> Float[Array, "B K G T S"]:
    """q' keys, float32."""
    B, T, K, G, H = q.shape
    by_head = q.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    return matmul(by_head, keys).reshape(B, K, G, T, -1)


def _weighted(weights: Float[Array, "B K G T S"], values: Float[Array, "B K S H"]) -> Float[Array, "B K G T H"]:
    """The sum of the values by weight, float32."""
    B, K, G, T, S = weights.shape
    return matmul(weights.reshape(B, K, G * T, S), values).reshape(B, K, G, T, -1)
