"""Decode attention on TPUs: a kernel that reads the visible columns of busy rows, and a prompt once for all its rows.

The kernel goes through a list of blocks of columns. For each prompt with busy rows it has each such row's own blocks,
the newest first, and then those blocks of the prompt that any of the rows sees. The newest column is written into a
block that is read anyway. Its own part of the softmax starts the row's sums, so that they are never empty. The sums of
all rows of a prompt stay on the chip until its last block (arXiv:1805.02867, section 3).

Heads of fewer than 128 dims are packed, so that they fill a matrix unit of 128 x 128: a head's queries are zero in the
dims of the other heads, and what they get of the other heads' values is dropped.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from groupax.models.attention import MASKED, LayerCache, Past, to_cache
from groupax.models.config import AttentionConfig, Chunks
from groupax.models.layers import scaled, softcapped

# Lanes of a vector register, and its rows in bfloat16.
LANES, SUBLANES = 128, 16
# Bytes of keys in a block: to read them and their values takes about as long as a step of the kernel takes at least.
BLOCK_BYTES = 128 * 1024
# Most bytes of the float32 scores of a prompt's rows and one of its blocks; with more rows a prompt is read again.
MAX_SCORES_BYTES = 1024 * 1024
# Kinds of blocks: of a row's own columns, the first of these, and the last that the rows of a prompt see.
_OWN, _FIRST, _LAST = 1, 2, 4


class _Sizes(NamedTuple):
    """Sizes of what the kernel works on.

    Attributes:
        packs: Number C of packs of heads.
        heads: Number P of kv heads in a pack.
        queries: Number M of a pack's query heads, padded to whole registers.
        rows: Number R of rows that read a prompt together.
        block, prompt_block: Number of columns in a block of a row's own, and of a prompt.
        by_dim: Whether values are laid out as [.., H, T], as XLA does if H does not fill registers.
    """

    packs: int
    heads: int
    queries: int
    rows: int
    block: int
    prompt_block: int
    by_dim: bool


class _Work(NamedTuple):
    """The U blocks that the kernel may have to go through, and what it has to know about rows.

    Attributes:
        newest: Own column of each row's newest token, -1 for an idle row.
        num_seen: Number of own columns that each row sees.
        prompt_first: First column of its prompt that each row sees, S if none.
        kind: Sum of the constants above.
        slot, block: Row, and block of its columns; in a prompt's block those of the block before, which stay.
        prompt, prompt_block: Prompt, and block of its columns; in a row's block those that are read before or after.
    """

    newest: Int[Array, "B"]
    num_seen: Int[Array, "B"]
    prompt_first: Int[Array, "B"]
    kind: Int[Array, "U"]
    slot: Int[Array, "U"]
    block: Int[Array, "U"]
    prompt: Int[Array, "U"]
    prompt_block: Int[Array, "U"]


def attend_past(
    attn: AttentionConfig,
    past: Past,
    cache: LayerCache,
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    interpret: Any = False,
) -> tuple[Float[Array, "B N H"], LayerCache]:
    """Computes `attention.attend_past`; idle rows get zeros, and their caches stay as they are.

    Args:
        attn, past, cache, q, k, v: Arguments of `attention.attend_past`.
        interpret: Whether, or how, to emulate the kernel with operations that every device has.
    """
    B = len(q)
    sizes = _sizes(q, cache)
    work, num_units = _list_blocks(sizes, attn, past, cache)
    common = max(q.dtype, cache.k.dtype, key=lambda dtype: dtype.itemsize)  # the cache may have its own dtype
    new = (to_cache(x, cache.k.dtype).astype(jnp.float32).reshape(B, sizes.packs, 1, -1) for x in (k, v))
    keys, prompt_keys = (_pack_keys(sizes, x) for x in (cache.k, cache.prompt_k))
    values, prompt_values = (_pack_values(sizes, x) for x in (cache.v, cache.prompt_v))
    arrays = (scaled(q, attn.scale).astype(common), *new, prompt_keys, prompt_values, keys, values)
    out, keys, values = _call_kernel(sizes, attn, work, num_units, arrays, interpret)
    keys = keys.reshape(cache.k.shape)
    values = values.reshape(keys.shape).swapaxes(2, 3) if sizes.by_dim else values
    out = jnp.where(past.lengths[:, None, None] > 0, out, 0)
    return out.astype(q.dtype), cache._replace(k=keys, v=values)


def _sizes(q: Float[Array, "B N H"], cache: LayerCache) -> _Sizes:
    (B, N, H), (Q, K, _, S), T = q.shape, cache.prompt_k.shape, cache.k.shape[3]
    heads = max(each for each in range(1, K + 1) if K % each == 0 and (each == 1 or each * H <= LANES))
    queries = -(-heads * N // K // SUBLANES) * SUBLANES
    column_bytes = K * H * cache.k.dtype.itemsize
    block, prompt_block = (_block_size(columns, column_bytes) for columns in (T, S))
    most_rows = max(1, MAX_SCORES_BYTES // (4 * K // heads * queries * prompt_block))
    rows = max(each for each in range(1, B // Q + 1) if (B // Q) % each == 0 and each <= most_rows)
    return _Sizes(K // heads, heads, queries, rows, block, prompt_block, H % LANES != 0)


def _block_size(columns: int, column_bytes: int) -> int:
    """Returns a divisor of the number of columns: whole registers of up to `BLOCK_BYTES`, or all if none divide it."""
    most = max(LANES, BLOCK_BYTES // column_bytes)
    return max((size for size in range(LANES, most + 1, LANES) if columns % size == 0), default=columns)


def _list_blocks(sizes: _Sizes, attn: AttentionConfig, past: Past, cache: LayerCache) -> tuple[_Work, Int[Array, ""]]:
    """Lists the blocks with visible columns and counts them; if all rows are idle, it has one of the first row."""
    (B, _, _, T), S, R = cache.k.shape, cache.prompt_k.shape[3], sizes.rows
    assert not isinstance(attn.window, Chunks), "the kernel has no chunks"
    num_blocks, num_prompt_blocks = T // sizes.block, S // sizes.prompt_block
    num_seen, prompt_first = past.lengths, jnp.repeat(past.prompt_starts, B // len(past.prompt_starts))
    if attn.window is not None:
        num_seen = jnp.minimum(num_seen, attn.window)
        prompt_first = jnp.clip(past.lengths + S - attn.window, prompt_first, S)
    column = past.lengths - 1
    newest = jnp.maximum(column, 0) // sizes.block
    own = jnp.where(num_seen > 0, newest + 1 - (past.lengths - num_seen) // sizes.block, 0)
    own = jnp.where((jnp.arange(B) == 0) & ~jnp.any(num_seen > 0), 1, own).reshape(-1, R)
    first = jnp.where(num_seen > 0, prompt_first, S).reshape(-1, R).min(axis=1, keepdims=True) // sizes.prompt_block

    # a group of R rows has a part for the blocks of each row, and one for those of the prompt
    rows, groups, newest = jnp.arange(B).reshape(-1, R), jnp.arange(B // R)[:, None], newest.reshape(-1, R)
    last = jnp.max(jnp.where(own > 0, rows, 0), axis=1, keepdims=True)
    # a prompt's first block is read ahead with its rows; where none of it is, the last of the prompt before stays
    read = lax.cummax(jnp.where(first < num_prompt_blocks, groups, 0))
    ahead = jnp.where(read == groups, jnp.minimum(first, num_prompt_blocks - 1), num_prompt_blocks - 1)
    counts = jnp.concatenate([own, num_prompt_blocks - first], axis=1)
    ends = jnp.cumsum(counts.reshape(-1)).reshape(counts.shape)
    oldest = jnp.sum(jnp.where(rows == last, newest + 1 - own, 0), axis=1, keepdims=True)
    unit, starts = jnp.arange(B * num_blocks + B // R * num_prompt_blocks), ends - counts
    of_rows = (1, starts[:, :-1], ends[:, -1:], rows, newest, read, ahead)
    of_prompts = (0, starts[:, -1:], ends[:, -1:], last, oldest, read, first)
    is_own, start, end, slot, block, group, prompt_block = _look_up(unit, ends, of_rows, of_prompts)
    index = unit - start
    kind = is_own * (_OWN + jnp.where(index == 0, _FIRST, 0)) + jnp.where(unit == end - 1, _LAST, 0)
    block, prompt_block = block - is_own * index, prompt_block + (1 - is_own) * index
    prompt = group * R * len(cache.prompt_k) // B
    return _Work(column, num_seen, prompt_first, kind, slot, block, prompt, prompt_block), ends[-1, -1]


def _look_up(
    units: Int[Array, "U"], ends: Int[Array, "J I"], of_rows: Sequence[Any], of_prompts: Sequence[Any]
) -> list[Int[Array, "U"]]:
    """Returns numbers of the part that each unit belongs to; of the I parts of a group the last is the prompt's.

    Sums over all parts take less time than gathers, on a TPU and to compile.
    """
    groups, parts = ends.shape
    ends = ends.reshape(1, -1)
    is_part = (units[:, None] < ends) & (units[:, None] >= jnp.pad(ends[:, :-1], ((0, 0), (1, 0))))
    found = []
    for numbers in zip(of_rows, of_prompts, strict=True):
        sides = (jnp.broadcast_to(x, (groups, num)) for x, num in zip(numbers, (parts - 1, 1), strict=True))
        table = jnp.concatenate(list(sides), axis=1).reshape(1, -1)
        found.append(jnp.sum(jnp.where(is_part, table, 0), axis=1))
    return found


def _pack_keys(sizes: _Sizes, keys: Float[Array, "B K H T"]) -> Float[Array, "B C D T"]:
    return keys.reshape(len(keys), sizes.packs, -1, keys.shape[3])


def _pack_values(sizes: _Sizes, values: Float[Array, "B K T H"]) -> Array:
    """Returns values as [B, C, P H, T] if they are laid out by dims, or else as they are."""
    return _pack_keys(sizes, values.swapaxes(2, 3)) if sizes.by_dim else values


def _call_kernel(
    sizes: _Sizes, attn: AttentionConfig, work: _Work, num_units: Array, arrays: tuple[Array, ...], interpret: Any
) -> Any:
    """Calls the kernel, which returns the results, and the keys and values with their newest column."""
    queries, _, _, _, _, keys, values = arrays
    (_, N, H), (_, C, D, T), M = queries.shape, keys.shape, sizes.rows * sizes.queries
    of_keys, of_values = 3, 3 if sizes.by_dim else 2
    written = [LANES if sizes.block % LANES == 0 else T] * 2
    if not sizes.by_dim:
        written[1] = SUBLANES if sizes.block % SUBLANES == 0 else T

    def blocks(size: int, dim: int, index: Callable[[Any, _Work], tuple[Any, Any]]) -> pl.BlockSpec:
        """Blocks of [_, C, D, _] if `dim` is 3, of [_, C, _, D] if it is 2, by their indices in dims 0 and `dim`."""

        def indices(unit: Any, *work: Any) -> tuple[Any, ...]:
            row, of_dim = index(unit, _Work(*work))
            return (row, 0, 0, of_dim) if dim == 3 else (row, 0, of_dim, 0)

        return pl.BlockSpec((1, C, D, size) if dim == 3 else (1, C, size, D), indices)

    row = pl.BlockSpec((1, N, H), lambda i, *work: (_Work(*work).slot[i], 0, 0))
    group = pl.BlockSpec((sizes.rows, N, H), lambda i, *work: (_Work(*work).slot[i] // sizes.rows, 0, 0))
    new = blocks(1, 2, lambda i, work: (work.slot[i], 0))
    of_prompt = [
        blocks(sizes.prompt_block, dim, lambda i, work: (work.prompt[i], work.prompt_block[i]))
        for dim in (of_keys, of_values)
    ]
    own = [blocks(sizes.block, dim, lambda i, work: (work.slot[i], work.block[i])) for dim in (of_keys, of_values)]
    newest = [
        blocks(size, dim, lambda i, work, size=size: (work.slot[i], jnp.maximum(work.newest[work.slot[i]], 0) // size))
        for size, dim in zip(written, (of_keys, of_values), strict=True)
    ]
    sums = [pltpu.VMEM((C, M, size), jnp.float32) for size in (1, 1, D)]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(work),
        grid=(num_units,),
        in_specs=[row, new, new, *of_prompt, *own],
        out_specs=[group, *newest],
        scratch_shapes=[pltpu.VMEM((C, M, D), queries.dtype), *sums, pltpu.VMEM((M, 1), jnp.int32)],
    )
    call = pl.pallas_call(
        partial(_kernel, sizes, attn),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (queries, keys, values)],
        grid_spec=grid,
        input_output_aliases={len(work) + len(arrays) - 2: 1, len(work) + len(arrays) - 1: 2},
        interpret=interpret,
        name="decode_attention",
        cost_estimate=_estimate_cost(sizes, arrays, sum(written)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
    )
    if not interpret:  # or else XLA copies a layer's whole cache into the chip's own memory and back
        arrays = (*arrays[:3], *(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays[3:]))
    return call(*work, *arrays)


def _estimate_cost(sizes: _Sizes, arrays: tuple[Array, ...], written: int) -> pl.CostEstimate:
    """Estimates the work if all columns of all rows and prompts are visible."""
    queries, _, _, prompt_keys, _, keys, _ = arrays
    (B, C, D, T), (Q, _, _, S), size = keys.shape, prompt_keys.shape, keys.dtype.itemsize
    scores = C * B * sizes.queries * (T + S)
    again = (B // Q // sizes.rows - 1) * 2 * prompt_keys.size * size
    num_bytes = sum(x.size * x.dtype.itemsize for x in (*arrays, queries)) + again + B * C * D * written * size
    return pl.CostEstimate(flops=4 * scores * D, transcendentals=scores, bytes_accessed=num_bytes)


def _kernel(sizes: _Sizes, attn: AttentionConfig, *refs: Any) -> None:
    """Goes through one block."""
    work, refs = _Work(*refs[: len(_Work._fields)]), refs[len(_Work._fields) :]
    q, new_k, new_v, prompt_k, prompt_v, keys, values, out, new_keys, new_values, *scratch = refs
    packed, highest, total, summed, first = scratch
    unit = pl.program_id(0)
    kind, slot = work.kind[unit], work.slot[unit]
    column = work.newest[slot]
    M = sizes.queries
    rows = pl.ds(pl.multiple_of(slot % sizes.rows * M, M), M)
    sums = (highest, total, summed)

    @pl.when(kind & _FIRST != 0)
    def _() -> None:
        _pack(sizes, q[0], packed, rows)
        key, value = new_k[0], new_v[0]
        scores = jnp.sum(packed[:, rows].astype(jnp.float32) * key, axis=-1, keepdims=True)
        highest[:, rows] = softcapped(scores, attn.softcap)
        total[:, rows] = jnp.ones_like(scores)
        summed[:, rows] = jnp.broadcast_to(value, (*scores.shape[:2], value.shape[2]))
        first[rows] = jnp.full((M, 1), work.prompt_first[slot], jnp.int32)
        _write(keys, key, new_keys, 3, column, sizes.block)
        _write(values, value, new_values, 3 if sizes.by_dim else 2, column, sizes.block)

    @pl.when(kind & _OWN != 0)
    def _() -> None:
        ages = column - work.block[unit] * sizes.block - lax.broadcasted_iota(jnp.int32, (1, sizes.block), 1)
        visible = (ages > 0) & (ages < work.num_seen[slot])  # the newest one is in the sums already
        _accumulate(sizes, attn, packed[:, rows], keys[0], values[0], visible, rows, sums)

    @pl.when(kind & _OWN == 0)
    def _() -> None:
        size = sizes.prompt_block
        columns = work.prompt_block[unit] * size + lax.broadcasted_iota(jnp.int32, (1, size), 1)
        _accumulate(sizes, attn, packed[...], prompt_k[0], prompt_v[0], columns >= first[...], slice(None), sums)

    @pl.when(kind & _LAST != 0)
    def _() -> None:
        lax.fori_loop(0, sizes.rows, lambda row, _: _unpack(sizes, total, summed, out, row), None)


def _pack(sizes: _Sizes, q: Float[Array, "N H"], packed: Any, rows: Any) -> None:
    """Writes a row's queries: for each pack [M, P H], where a head's are zero in the dims of other heads."""
    (N, H), P = q.shape, sizes.heads
    G = N // (sizes.packs * P)

    def zeros(queries: int, dims: int) -> Array:
        return jnp.zeros((queries, dims), q.dtype)

    def filled(parts: list[Array], axis: int) -> Array:
        return jnp.concatenate([part for part in parts if part.size], axis)

    for pack in range(sizes.packs):
        own = [q[first : first + G] for first in range(pack * P * G, (pack + 1) * P * G, G)]
        wide = [filled([zeros(G, i * H), x, zeros(G, (P - 1 - i) * H)], 1) for i, x in enumerate(own)]
        packed[pack, rows] = filled([*wide, zeros(sizes.queries - P * G, P * H)], 0)


def _unpack(sizes: _Sizes, total: Any, summed: Any, out: Any, row: Array) -> None:
    """Writes a row's results, those of its heads' own dims."""
    (_, N, H), P, M = out.shape, sizes.heads, sizes.queries
    G = N // (sizes.packs * P)
    rows = pl.ds(pl.multiple_of(row * M, M), M)
    for pack in range(sizes.packs):
        of_pack = summed[pack, rows] / total[pack, rows]
        for head in range(P):
            first = (pack * P + head) * G
            own = of_pack[head * G : (head + 1) * G, head * H : (head + 1) * H]
            out[row, first : first + G] = own.astype(out.dtype)


def _accumulate(
    sizes: _Sizes,
    attn: AttentionConfig,
    q: Float[Array, "C M D"],
    keys: Float[Array, "C D S"],
    values: Array,
    visible: Bool[Array, "#M S"],
    rows: Any,
    sums: tuple[Any, Any, Any],
) -> None:
    """Adds a block's columns to the sums of the rows."""
    highest, total, summed = sums
    scores = softcapped(_multiply(q, keys.astype(q.dtype), (2, 1)), attn.softcap)
    scores = jnp.where(visible[None], scores, MASKED)
    before = highest[:, rows]
    highest[:, rows] = now = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
    weights, rescale = jnp.exp(scores - now), jnp.exp(before - now)
    total[:, rows] = total[:, rows] * rescale + jnp.sum(weights, axis=-1, keepdims=True)
    of_values = _multiply(weights.astype(q.dtype), values.astype(q.dtype), (2, 2 if sizes.by_dim else 1))
    summed[:, rows] = summed[:, rows] * rescale + of_values


def _multiply(x: Array, y: Array, contracted: tuple[int, int]) -> Array:
    """Multiplies each pack of x with that of y, accumulating in float32."""
    dims = (((contracted[0],), (contracted[1],)), ((0,), (0,)))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _write(block: Any, newest: Float[Array, "C 1 D"], out: Any, dim: int, column: Array, size: int) -> None:
    """Writes those registers of a block that have the newest column, with it; of an idle row as they are."""
    width, own = out.shape[dim], jnp.maximum(column, 0)
    start = 0 if width == size else pl.multiple_of(own % size // width * width, width)
    wide = jnp.broadcast_to(newest, (len(newest), width, newest.shape[2]))
    if dim == 3:
        old, wide = block[0, :, :, pl.ds(start, width)], wide.swapaxes(1, 2)
    else:
        old = block[0, :, pl.ds(start, width)]
    is_new = (lax.broadcasted_iota(jnp.int32, wide.shape, dim - 1) == own % width) & (column >= 0)
    out[0] = jnp.where(is_new, wide, old.astype(jnp.float32)).astype(out.dtype)
