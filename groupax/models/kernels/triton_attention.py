"""Attention while decoding as Triton kernels, for NVIDIA GPUs; `models.attention` defines the computation.

The kernels go through the visible columns of the cache in blocks, and no scores reach the device's memory. The first
one attends from all rows of a prompt to a part of its columns, which are thus read once for all these rows; the parts
are as many as keep the device busy (arXiv:2311.01282 splits sequences for the same reason). The last one writes a row's
newest keys and values into the cache, attends to its own columns, and merges the result with those of the prompt's
parts.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from groupax.models.attention import MASKED, LayerCache, Past, to_cache
from groupax.models.config import AttentionConfig, Chunks
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


MIN_TILE = 16  # the smallest dim of Triton's matmuls
MAX_QUERIES, QUERY_BYTES = 64, 1 << 15  # most queries of a prompt that one program attends from, and their size
BLOCK_BYTES = 1 << 14  # of the keys of a block; two blocks of keys and values fit the shared memory of all these GPUs
MAX_BLOCK = 128
PROGRAMS = 256  # for prompts, about two per multiprocessor of a large GPU
PARAMS = triton.CompilerParams(num_warps=4, num_stages=2)


class Sizes(NamedTuple):
    """Static sizes of the kernels.

    Attributes:
        rows: Rows per prompt.
        heads: Query heads N.
        group: Query heads per key/value head.
        dims: Dims per head, padded to a power of two.
        tile: Queries of the first kernel's programs.
        own_tile: Queries of the second kernel's programs.
        block: Columns that are loaded at a time.
        num_tiles, num_parts: Numbers of tiles of a prompt's queries and of parts of its columns.
    """

    rows: int
    heads: int
    group: int
    dims: int
    tile: int
    own_tile: int
    block: int
    num_tiles: int
    num_parts: int


def sizes_of(q: Float[Array, "B N H"], cache: LayerCache) -> Sizes:
    """Returns the sizes of the kernels for arrays of these shapes."""
    (B, N, H), (Q, K, _, S) = q.shape, cache.prompt_k.shape
    R, G = B // Q, N // K
    dims = max(MIN_TILE, pl.next_power_of_2(H))
    item_bytes = max(q.dtype.itemsize, cache.k.dtype.itemsize)
    block = max(MIN_TILE, min(MAX_BLOCK, BLOCK_BYTES // (dims * item_bytes)))
    max_queries = min(MAX_QUERIES, QUERY_BYTES // (dims * item_bytes))
    tile = min(max_queries, max(MIN_TILE, pl.next_power_of_2(R * G)))
    num_tiles = pl.cdiv(R * G, tile)
    own_tile = max(MIN_TILE, pl.next_power_of_2(G))
    num_parts = min(pl.cdiv(S, block), pl.cdiv(PROGRAMS, Q * K * num_tiles))
    return Sizes(R, N, G, dims, tile, own_tile, block, num_tiles, num_parts)


def attend_past(
    attn: AttentionConfig,
    past: Past,
    cache: LayerCache,
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    interpret: bool = False,
) -> tuple[Float[Array, "B N H"], LayerCache]:
    """Computes `attention.attend_past`; with `interpret` by operations that every device has, for tests."""
    sizes = sizes_of(q, cache)
    heads = jnp.concatenate([q, k, v], axis=1)  # one array, which one kernel can compute
    parts = _attend_prompts(attn, sizes, past, cache, heads, interpret)
    return _attend_rows(attn, sizes, past, cache, heads, parts, interpret)


def _prompt_blocks(sizes: Sizes, num_columns: int, start: Array) -> tuple[Array, Array]:
    """Returns a prompt's first block and its number of blocks."""
    first = lax.div(start, sizes.block)
    return first, jnp.where(start < num_columns, pl.cdiv(num_columns, sizes.block) - first, 0)


def _attend_prompts(
    attn: AttentionConfig, sizes: Sizes, past: Past, cache: LayerCache, heads: Array, interpret: bool
) -> Sequence[Array]:
    """Attends to the P parts of prompts, and returns their results and the logarithms of their softmax's sums.

    These are [Q, K, P, R G, H] and [Q, K, P, R G].
    """
    (Q, K, H, S), M, P = cache.prompt_k.shape, sizes.rows * sizes.group, sizes.num_parts
    per_head = lambda x, head, _: (x, head, 0, 0)  # noqa: E731
    return pl.pallas_call(
        partial(_attend_prompt, attn, sizes),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((Q, K, P, M, H), (Q, K, P, M))],
        grid=(Q, K, P * sizes.num_tiles),
        in_specs=[
            *[pl.no_block_spec] * 3,
            pl.BlockSpec((None, None, H, S), per_head),
            pl.BlockSpec((None, None, S, H), per_head),
        ],
        out_specs=[
            pl.BlockSpec((None, None, P, M, H), lambda x, head, _: (x, head, 0, 0, 0)),
            pl.BlockSpec((None, None, P, M), per_head),
        ],
        compiler_params=PARAMS,
        cost_estimate=_cost(Q * K * M * S, H, [heads, cache.prompt_k, cache.prompt_v]),
        interpret=interpret,
        name="attend_prompt",
    )(heads, past.prompt_starts, past.lengths, cache.prompt_k, cache.prompt_v)


def _attend_prompt(attn: AttentionConfig, sizes: Sizes, *refs: Any) -> None:
    heads, starts, lengths, keys, values, out, lse = refs
    prompt, head, tile = pl.program_id(0), pl.program_id(1), lax.div(pl.program_id(2), sizes.num_parts)
    part = lax.rem(pl.program_id(2), sizes.num_parts)
    H, S = keys.shape
    query, dim = tile * sizes.tile + jnp.arange(sizes.tile), jnp.arange(sizes.dims)
    is_query = query < sizes.rows * sizes.group
    row = prompt * sizes.rows + lax.div(query, sizes.group)
    length = triton.load(lengths.at[row], mask=is_query, other=0)
    start = starts[prompt]
    first, num_blocks = _prompt_blocks(sizes, S, start)
    per_part = blocks_per_part(num_blocks, sizes.num_parts)
    first_of_part = first + part * per_part
    is_needed = (first_of_part < first + num_blocks) & (jnp.max(length) > 0)
    visible_from = jnp.full_like(length, start)
    if attn.window is not None:  # a column's distance before a row's newest token is length - 1 + S - column
        visible_from = jnp.maximum(start, length + S - attn.window)
    begin_column = jnp.min(jnp.where(length > 0, visible_from, S))
    begin = jnp.maximum(first_of_part, lax.div(begin_column, sizes.block))
    end = jnp.where(is_needed, jnp.minimum(first_of_part + per_part, first + num_blocks), begin)
    mask = is_query[:, None] & (dim < H)[None, :]
    query_head = head * sizes.group + lax.rem(query, sizes.group)
    queries = triton.load(heads.at[row[:, None], query_head[:, None], dim[None, :]], mask=mask, other=0.0)
    queries = queries.astype(_widest(heads, keys))

    def add_block(block: Array, softmax: Softmax) -> Softmax:
        column = block * sizes.block + jnp.arange(sizes.block)
        block_keys, block_values = load_columns(keys, values, dim, column, begin_column, S)
        visible = (column < S)[None, :] & (column[None, :] >= visible_from[:, None])
        return add_columns(attn, softmax, queries, block_keys, block_values, visible)

    softmax = lax.fori_loop(begin, end, add_block, no_columns(sizes.tile, sizes.dims))
    pl.when(is_needed)(partial(write_part, softmax, out, lse, part, query, is_query))


def _attend_rows(
    attn: AttentionConfig,
    sizes: Sizes,
    past: Past,
    cache: LayerCache,
    heads: Array,
    parts: Sequence[Array],
    interpret: bool,
) -> tuple[Float[Array, "B N H"], LayerCache]:
    """Writes the newest keys and values, attends to own columns, and merges the parts of prompts."""
    B, K, H, T = cache.k.shape
    own_specs = [pl.BlockSpec((None, None, *shape), lambda row, head: (row, head, 0, 0)) for shape in ((H, T), (T, H))]
    out, keys, values = pl.pallas_call(
        partial(_attend_row, attn, sizes, cache.prompt_k.shape[3]),
        out_shape=[
            jax.ShapeDtypeStruct((B, sizes.heads, H), heads.dtype),
            jax.ShapeDtypeStruct(cache.k.shape, cache.k.dtype),
            jax.ShapeDtypeStruct(cache.v.shape, cache.v.dtype),
        ],
        grid=(B, K),
        in_specs=[
            *own_specs,
            *[pl.no_block_spec] * 3,
            *(_per_prompt_spec(each, sizes.rows) for each in parts),
        ],
        out_specs=[pl.BlockSpec((None, sizes.heads, H), lambda row, _: (row, 0, 0)), *own_specs],
        input_output_aliases={0: 1, 1: 2},
        compiler_params=PARAMS,
        cost_estimate=_cost(B * sizes.heads * T, H, [heads, *parts, cache.k, cache.v]),
        interpret=interpret,
        name="attend_row",
    )(cache.k, cache.v, heads, past.prompt_starts, past.lengths, *parts)
    return out, cache._replace(k=keys, v=values)


def _attend_row(attn: AttentionConfig, sizes: Sizes, num_prompt_columns: int, *refs: Any) -> None:
    keys, values, heads, starts, lengths, prompt_out, prompt_lse, out, new_keys, new_values = refs
    row, head = pl.program_id(0), pl.program_id(1)
    length = lengths[row]
    queries = _own_queries(sizes, heads, keys, row, head)
    key, value = _write_newest(sizes, heads, row, head, length, new_keys, new_values)
    softmax = one_column(attn, queries, key.astype(queries.dtype), value.astype(queries.dtype))
    own = _own_columns(attn, sizes, length)
    query = jnp.arange(sizes.own_tile)
    is_query = query < sizes.group
    softmax = _add_own(attn, sizes, own, softmax, queries, (keys, values))
    start = jnp.where(length > 0, starts[lax.div(row, sizes.rows)], num_prompt_columns)
    _, num_blocks = _prompt_blocks(sizes, num_prompt_columns, start)
    of_prompt = lax.rem(row, sizes.rows) * sizes.group + query
    num_parts = num_nonempty_parts(num_blocks, sizes.num_parts)
    softmax = add_parts(softmax, prompt_out, prompt_lse, of_prompt, is_query, num_parts)
    dim, result = jnp.arange(sizes.dims), softmax.out / softmax.total[:, None]
    mask = is_query[:, None] & (dim < out.shape[1])[None, :]
    triton.store(out.at[(head * sizes.group + query)[:, None], dim[None, :]], result.astype(out.dtype), mask=mask)


def _own_queries(sizes: Sizes, heads: Any, keys: Any, row: Array, head: Array) -> Array:
    """Loads the queries of a row that share a key/value head."""
    query, dim = jnp.arange(sizes.own_tile), jnp.arange(sizes.dims)
    mask = (query < sizes.group)[:, None] & (dim < heads.shape[2])[None, :]
    queries = triton.load(heads.at[row, (head * sizes.group + query)[:, None], dim[None, :]], mask=mask, other=0.0)
    return queries.astype(_widest(heads, keys))


def _write_newest(
    sizes: Sizes, heads: Any, row: Array, head: Array, length: Array, keys: Any, values: Any
) -> tuple[Array, Array]:
    """Writes a busy row's newest key and value into the cache, and returns them in its dtype."""
    dim = jnp.arange(sizes.dims)
    mask, newest = dim < heads.shape[2], jnp.maximum(length, 1) - 1
    is_written = mask & (length > 0)
    key_head = sizes.heads + head
    key = to_cache(triton.load(heads.at[row, key_head, dim], mask=mask, other=0.0), keys.dtype)
    value_head = key_head + pl.num_programs(1)
    value = to_cache(triton.load(heads.at[row, value_head, dim], mask=mask, other=0.0), values.dtype)
    triton.store(keys.at[dim, newest], key, mask=is_written)
    triton.store(values.at[newest, dim], value, mask=is_written)
    return key, value


class _OwnColumns(NamedTuple):
    """The own columns that a row sees before its newest one.

    Attributes:
        first: The first column.
        newest: The newest column, which is not one of them.
        num_blocks: Number of blocks that have them.
    """

    first: Array
    newest: Array
    num_blocks: Array


def _own_columns(attn: AttentionConfig, sizes: Sizes, length: Array) -> _OwnColumns:
    assert not isinstance(attn.window, Chunks), "the kernels have no chunks"
    seen = length if attn.window is None else jnp.minimum(length, attn.window)
    first, newest = length - seen, jnp.maximum(length, 1) - 1
    num_blocks = pl.cdiv(newest, sizes.block) - lax.div(first, sizes.block)
    return _OwnColumns(first, newest, jnp.where(seen > 1, num_blocks, 0))


def _add_own(
    attn: AttentionConfig,
    sizes: Sizes,
    own: _OwnColumns,
    softmax: Softmax,
    queries: Array,
    cached: tuple[Any, Any],
) -> Softmax:
    """Adds the cached keys and values of a row's own columns."""
    dim, first_block = jnp.arange(sizes.dims), lax.div(own.first, sizes.block)

    def add_block(index: Array, softmax: Softmax) -> Softmax:
        column = (first_block + index) * sizes.block + jnp.arange(sizes.block)
        block_keys, block_values = load_columns(*cached, dim, column, own.first, own.newest)
        visible = ((column >= own.first) & (column < own.newest))[None, :]
        return add_columns(attn, softmax, queries, block_keys, block_values, visible)

    return lax.fori_loop(jnp.int32(0), own.num_blocks, add_block, softmax)


def _per_prompt_spec(x: Array, rows: int) -> pl.BlockSpec:
    """Returns the spec that gives each row and head a block of an array with an entry per prompt of `rows` rows."""
    return pl.BlockSpec(
        (None, None, *x.shape[2:]), lambda row, head: (lax.div(row, rows), head, *(0 for _ in x.shape[2:]))
    )


def _cost(num_scores: int, dims: int, read: Sequence[Array]) -> pl.CostEstimate:
    """Returns the work of a kernel if all columns are visible."""
    num_bytes = sum(x.size * x.dtype.itemsize for x in read)
    return pl.CostEstimate(flops=4 * num_scores * dims, transcendentals=num_scores, bytes_accessed=num_bytes)


def _widest(heads: Any, keys: Any) -> Any:
    """Returns the dtype of matmuls: the queries' or, where it has more bits, the cache's."""
    return max(heads.dtype, keys.dtype, key=lambda dtype: dtype.itemsize)
