"""Attention while decoding as two Triton kernels, for NVIDIA GPUs; `models.decode_attention` defines the computation.

Both kernels go through the visible columns of the cache in blocks, with the softmax rescaled as its maximum grows
(arXiv:1805.02867), so that scores never reach the device's memory. The first one attends from all rows of a prompt to
a part of its columns, which are thus read once for all these rows; the parts are as many as keep the device busy
(arXiv:2311.01282, "flash decoding"). The second one writes the newest keys and values of a row into the cache, attends
to the row's own columns, and merges the result with those of the prompt's parts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from groupax.models.attention import MASKED
from groupax.models.config import AttentionConfig
from groupax.models.decode_attention import LayerCache, Past
from groupax.models.layers import softcapped

MIN_TILE = 16  # the smallest dim of Triton's matmuls
MAX_QUERIES = 64  # queries of a prompt that one program attends from
BLOCK_BYTES = 1 << 14  # of the keys of a block; two blocks of keys and values fit the shared memory of all these GPUs
MAX_BLOCK = 128
PROGRAMS = 256  # of the first kernel, about two per multiprocessor of a large GPU
GRANULE = 16  # columns of keys that are loaded together, as vectors


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
    tile = min(MAX_QUERIES, max(MIN_TILE, pl.next_power_of_2(R * G)))
    num_tiles = pl.cdiv(R * G, tile)
    num_parts = min(pl.cdiv(S, block), pl.cdiv(PROGRAMS, Q * K * num_tiles))
    own_tile = max(MIN_TILE, pl.next_power_of_2(G))
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
    """Computes `decode_attention.attend_past`; with `interpret` by operations that every device has, for tests."""
    sizes = sizes_of(q, cache)
    heads = jnp.concatenate([q, k, v], axis=1)  # one array, which one kernel can compute
    partial_out, partial_lse = _attend_prompts(attn, sizes, past, cache, heads, interpret)
    return _attend_rows(attn, sizes, past, cache, heads, partial_out, partial_lse, interpret)


class _Softmax(NamedTuple):
    """A softmax-weighted sum of values so far, before the division by `total`, and the highest score."""

    out: Float[Array, "M H"]
    total: Float[Array, "M"]
    highest: Float[Array, "M"]


def _add_columns(
    attn: AttentionConfig, softmax: _Softmax, queries: Array, keys: Array, values: Array, visible: Array
) -> _Softmax:
    """Adds a block of columns: keys [H, C], values [C, H], visible [M or 1, C]."""
    scores = jnp.dot(queries, keys.astype(queries.dtype), preferred_element_type=jnp.float32) * attn.scale
    scores = jnp.where(visible, softcapped(scores, attn.softcap), MASKED)
    highest = jnp.maximum(softmax.highest, jnp.max(scores, axis=1))
    weights = jnp.where(visible, jnp.exp(scores - highest[:, None]), 0.0)
    kept = jnp.exp(softmax.highest - highest)
    out = jnp.dot(weights.astype(queries.dtype), values.astype(queries.dtype), preferred_element_type=jnp.float32)
    return _Softmax(softmax.out * kept[:, None] + out, softmax.total * kept + jnp.sum(weights, axis=1), highest)


def _parts(sizes: Sizes, num_columns: int, start: Array) -> tuple[Array, Array, Array]:
    """Returns a prompt's first block, its number of blocks, and the blocks per part."""
    first = lax.div(start, sizes.block)
    num_blocks = jnp.where(start < num_columns, pl.cdiv(num_columns, sizes.block) - first, 0)
    return first, num_blocks, lax.div(num_blocks + sizes.num_parts - 1, sizes.num_parts)


def _attend_prompts(
    attn: AttentionConfig, sizes: Sizes, past: Past, cache: LayerCache, heads: Array, interpret: bool
) -> tuple[Float[Array, "Q K P M H"], Float[Array, "Q K P M"]]:
    """Attends to the P parts of each prompt. Returns each part's result and the logarithm of its softmax's sum."""
    Q, K, H, S = cache.prompt_k.shape
    M, P = sizes.rows * sizes.group, sizes.num_parts
    per_head = lambda prompt, head, _: (prompt, head, 0, 0)  # noqa: E731
    return pl.pallas_call(
        partial(_prompt_kernel, attn, sizes),
        out_shape=[
            jax.ShapeDtypeStruct((Q, K, P, M, H), jnp.float32),
            jax.ShapeDtypeStruct((Q, K, P, M), jnp.float32),
        ],
        grid=(Q, K, P * sizes.num_tiles),
        in_specs=[
            pl.no_block_spec,
            pl.no_block_spec,
            pl.no_block_spec,
            pl.BlockSpec((None, None, H, S), per_head),
            pl.BlockSpec((None, None, S, H), per_head),
        ],
        out_specs=[
            pl.BlockSpec((None, None, P, M, H), lambda prompt, head, _: (prompt, head, 0, 0, 0)),
            pl.BlockSpec((None, None, P, M), per_head),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attend_prompts",
    )(heads, past.prompt_starts, past.lengths, cache.prompt_k, cache.prompt_v)


def _prompt_kernel(
    attn: AttentionConfig,
    sizes: Sizes,
    heads: Any,
    starts: Any,
    lengths: Any,
    keys: Any,
    values: Any,
    out: Any,
    lse: Any,
) -> None:
    prompt, head, tile = pl.program_id(0), pl.program_id(1), lax.div(pl.program_id(2), sizes.num_parts)
    part = lax.rem(pl.program_id(2), sizes.num_parts)
    H, S = keys.shape
    query, dim = tile * sizes.tile + jnp.arange(sizes.tile), jnp.arange(sizes.dims)
    is_query = query < sizes.rows * sizes.group
    row = prompt * sizes.rows + lax.div(query, sizes.group)
    length = triton.load(lengths.at[row], mask=is_query, other=0)
    start = starts[prompt]
    first, num_blocks, per_part = _parts(sizes, S, start)
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
    queries = triton.load(heads.at[row[:, None], query_head[:, None], dim[None, :]], mask=mask, other=0)
    queries = queries.astype(_widest(heads, keys))

    def add_block(block: Array, softmax: _Softmax) -> _Softmax:
        column = block * sizes.block + jnp.arange(sizes.block)
        block_keys, block_values = _load(keys, values, dim, column, begin_column, S)
        visible = (column < S)[None, :] & (column[None, :] >= visible_from[:, None])
        return _add_columns(attn, softmax, queries, block_keys, block_values, visible)

    softmax = _Softmax(
        jnp.zeros((sizes.tile, sizes.dims), jnp.float32),
        jnp.zeros(sizes.tile, jnp.float32),
        jnp.full(sizes.tile, MASKED, jnp.float32),
    )
    softmax = lax.fori_loop(begin, end, add_block, softmax)
    total = jnp.maximum(softmax.total, jnp.finfo(jnp.float32).tiny)

    @pl.when(is_needed)
    def write() -> None:
        triton.store(out.at[part, query[:, None], dim[None, :]], softmax.out / total[:, None], mask=mask)
        triton.store(lse.at[part, query], softmax.highest + jnp.log(total), mask=is_query)


def _attend_rows(
    attn: AttentionConfig,
    sizes: Sizes,
    past: Past,
    cache: LayerCache,
    heads: Array,
    prompt_out: Array,
    prompt_lse: Array,
    interpret: bool,
) -> tuple[Float[Array, "B N H"], LayerCache]:
    """Writes the newest keys and values, attends to the rows' own columns, and merges the prompts' results."""
    B, K, H, T = cache.k.shape
    P, M = prompt_lse.shape[2:]
    keys_spec = pl.BlockSpec((None, None, H, T), lambda row, head: (row, head, 0, 0))
    values_spec = pl.BlockSpec((None, None, T, H), lambda row, head: (row, head, 0, 0))
    out, keys, values = pl.pallas_call(
        partial(_row_kernel, attn, sizes, cache.prompt_k.shape[3]),
        out_shape=[
            jax.ShapeDtypeStruct((B, sizes.heads, H), heads.dtype),
            jax.ShapeDtypeStruct(cache.k.shape, cache.k.dtype),
            jax.ShapeDtypeStruct(cache.v.shape, cache.v.dtype),
        ],
        grid=(B, K),
        in_specs=[
            pl.BlockSpec((None, *heads.shape[1:]), lambda row, _: (row, 0, 0)),
            pl.no_block_spec,
            pl.no_block_spec,
            pl.no_block_spec,
            pl.BlockSpec((None, None, P, M, H), lambda row, head: (lax.div(row, sizes.rows), head, 0, 0, 0)),
            pl.BlockSpec((None, None, P, M), lambda row, head: (lax.div(row, sizes.rows), head, 0, 0)),
            keys_spec,
            values_spec,
        ],
        out_specs=[pl.BlockSpec((None, sizes.heads, H), lambda row, _: (row, 0, 0)), keys_spec, values_spec],
        input_output_aliases={6: 1, 7: 2},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attend_rows",
    )(heads, past.prompt_starts, past.lengths, past.column, prompt_out, prompt_lse, cache.k, cache.v)
    return out, cache._replace(k=keys, v=values)


def _row_kernel(
    attn: AttentionConfig,
    sizes: Sizes,
    num_prompt_columns: int,
    heads: Any,
    starts: Any,
    lengths: Any,
    column: Any,
    prompt_out: Any,
    prompt_lse: Any,
    keys: Any,
    values: Any,
    out: Any,
    new_keys: Any,
    new_values: Any,
) -> None:
    row, head = pl.program_id(0), pl.program_id(1)
    H = keys.shape[0]
    newest, length = column[...], lengths[row]
    query, dim = jnp.arange(sizes.own_tile), jnp.arange(sizes.dims)
    mask = (query < sizes.group)[:, None] & (dim < H)[None, :]
    dtype = _widest(heads, keys)
    queries = triton.load(heads.at[(head * sizes.group + query)[:, None], dim[None, :]], mask=mask, other=0)
    queries = queries.astype(dtype)
    key_head = sizes.heads + head
    key = triton.load(heads.at[key_head, dim], mask=dim < H, other=0).astype(keys.dtype)
    value = triton.load(heads.at[key_head + pl.num_programs(1), dim], mask=dim < H, other=0).astype(values.dtype)
    triton.store(new_keys.at[dim, newest], key, mask=dim < H)
    triton.store(new_values.at[newest, dim], value, mask=dim < H)
    softmax = _newest(attn, queries, key.astype(dtype), value.astype(dtype))
    softmax = _add_own(attn, sizes, softmax, queries, keys, values, newest, length)
    start = jnp.where(length > 0, starts[lax.div(row, sizes.rows)], num_prompt_columns)
    softmax = _add_prompt(sizes, softmax, prompt_out, prompt_lse, start, num_prompt_columns, lax.rem(row, sizes.rows))
    result = (softmax.out / softmax.total[:, None]).astype(out.dtype)
    triton.store(out.at[(head * sizes.group + query)[:, None], dim[None, :]], result, mask=mask)


def _newest(attn: AttentionConfig, queries: Array, key: Array, value: Array) -> _Softmax:
    """Attends to the newest token, whose keys and values are not read from the cache."""
    wide = queries.astype(jnp.float32), key.astype(jnp.float32)
    scores = softcapped(jnp.sum(wide[0] * wide[1][None, :], axis=1) * attn.scale, attn.softcap)
    out = jnp.broadcast_to(value.astype(jnp.float32)[None, :], queries.shape)
    return _Softmax(out, jnp.ones_like(scores), scores)


def _add_own(
    attn: AttentionConfig,
    sizes: Sizes,
    softmax: _Softmax,
    queries: Array,
    keys: Any,
    values: Any,
    newest: Array,
    length: Array,
) -> _Softmax:
    """Adds a row's own columns before the newest, which are at the ring's end and then at its start."""
    T = keys.shape[1]
    dim = jnp.arange(sizes.dims)
    seen = length if attn.window is None else jnp.minimum(length, attn.window)
    first = newest - jnp.maximum(seen, 1) + 1  # negative for columns at the ring's end
    wrapped_block, own_block = lax.div(first + T, sizes.block), lax.div(jnp.maximum(first, 0), sizes.block)
    num_wrapped = jnp.where(first < 0, pl.cdiv(T, sizes.block) - wrapped_block, 0)
    num_own = pl.cdiv(newest, sizes.block) - own_block

    def add_block(index: Array, softmax: _Softmax) -> _Softmax:
        is_wrapped = index < num_wrapped
        block = jnp.where(is_wrapped, wrapped_block + index, own_block + index - num_wrapped)
        begin = jnp.where(is_wrapped, first + T, jnp.maximum(first, 0))
        end = jnp.where(is_wrapped, T, newest)
        column = block * sizes.block + jnp.arange(sizes.block)
        block_keys, block_values = _load(keys, values, dim, column, begin, end)
        visible = ((column >= begin) & (column < end))[None, :]
        return _add_columns(attn, softmax, queries, block_keys, block_values, visible)

    return lax.fori_loop(0, jnp.where(seen > 1, num_wrapped + num_own, 0), add_block, softmax)


def _add_prompt(
    sizes: Sizes, softmax: _Softmax, out: Any, lse: Any, start: Array, num_columns: int, row_of_prompt: Array
) -> _Softmax:
    """Adds the first kernel's results for the parts of a row's prompt."""
    query, dim = jnp.arange(sizes.own_tile), jnp.arange(sizes.dims)
    mask = (query < sizes.group)[:, None] & (dim < out.shape[-1])[None, :]
    index = row_of_prompt * sizes.group + query
    _, num_blocks, per_part = _parts(sizes, num_columns, start)

    def add_part(part: Array, softmax: _Softmax) -> _Softmax:
        part_lse = triton.load(lse.at[part, index], mask=query < sizes.group, other=MASKED)
        part_out = triton.load(out.at[part, index[:, None], dim[None, :]], mask=mask, other=0)
        highest = jnp.maximum(softmax.highest, part_lse)
        kept, weight = jnp.exp(softmax.highest - highest), jnp.exp(part_lse - highest)
        merged = softmax.out * kept[:, None] + part_out * weight[:, None]
        return _Softmax(merged, softmax.total * kept + weight, highest)

    return lax.fori_loop(0, lax.div(num_blocks + per_part - 1, jnp.maximum(per_part, 1)), add_part, softmax)


def _load(keys: Any, values: Any, dim: Array, column: Array, begin: Array, end: Array | int) -> tuple[Array, Array]:
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
        triton.load(keys.at[dim[:, None], column[None, :]], mask=loaded[None, :] & (dim < H)[:, None], other=0),
        triton.load(values.at[column[:, None], dim[None, :]], mask=needed[:, None] & (dim < H)[None, :], other=0),
    )


def _widest(heads: Any, keys: Any) -> Any:
    """Returns the dtype of matmuls: the queries' or, where it has more bits, the cache's."""
    return max(heads.dtype, keys.dtype, key=lambda dtype: dtype.itemsize)
