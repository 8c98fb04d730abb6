"""Products of rows with the matrices of their groups as kernels for NVIDIA GPUs, written in Pallas for Triton.

Rows that are sorted by group are multiplied by the matrices of their groups, where XLA would multiply all rows by all
matrices. A tile holds rows of one group only, so that a group's last tile may be partly empty; groups without rows have
no tiles. The tiles are found on the device from the sizes of the groups, and their number is bounded by that of rows
and groups. Matrices are read as they lie in memory, never copied or transposed. Sums are in float32.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

# The most and the fewest rows, columns and summands of a block; Triton multiplies no smaller ones.
MAX_BLOCK, MIN_BLOCK = 128, 16
# Bytes of the summands in one row of a block. Three pairs of 128 rows, in flight at a time, take 96 KiB of shared
# memory; GPUs of compute capability 8.6 and 8.9 have 99 KiB per kernel, others more.
_SUMMED_BYTES, _NUM_STAGES = 128, 3


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    rows: Float[Array, "R I"], weights: Float[Array, "E O I"], sizes: Int[Array, "E"], interpret: bool = False
) -> Float[Array, "R O"]:
    """Multiplies each row by the transpose of its group's matrix.

    Args:
        rows: Rows sorted by group. Those after the last group's give zeros.
        weights: Matrix of each group, in the rows' dtype.
        sizes: Number of rows of each group.
        interpret: Whether to emulate the kernels, on any device.
    """
    return _multiply_rows(rows, weights, sizes, interpret, transposed=True)


def _backward(interpret: bool, saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    rows, weights, sizes = saved
    d_rows = _multiply_rows(cotangent, weights, sizes, interpret, transposed=False)
    return d_rows, _sum_outer_products(cotangent, rows, sizes, interpret), None


grouped_matmul.defvjp(
    lambda rows, weights, sizes, interpret: (grouped_matmul(rows, weights, sizes, interpret), (rows, weights, sizes)),
    _backward,
)


class RowTiles(NamedTuple):
    """The tiles of sorted rows, in their order; unused ones are at the end and have no rows.

    Attributes:
        groups: Group of each tile; the number of groups if its rows are after the last group's.
        starts: First row of each tile.
        ends: First row after the tile's group.
    """

    groups: Int[Array, "tiles"]
    starts: Int[Array, "tiles"]
    ends: Int[Array, "tiles"]


def row_block(num_rows: int, num_groups: int) -> int:
    """Returns the number of rows of a tile: at most half of a group's mean number, if that is in [16, 128].

    Each group wastes less than one tile, so that with 32 rows per group and more the tiles compute less than 1.5 times
    the products that are needed.
    """
    half = max(1, num_rows // (2 * num_groups))
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << (half.bit_length() - 1)))


def row_tiles(sizes: Int[Array, "E"], num_rows: int, block: int) -> RowTiles:
    """Divides the rows of each group into tiles; the rows after the last group's are one more group."""
    sizes = jnp.append(sizes, num_rows - jnp.sum(sizes)).astype(jnp.int32)
    tiles_of_group = (sizes + block - 1) // block
    row_ends, tile_ends = jnp.cumsum(sizes), jnp.cumsum(tiles_of_group)
    tiles = jnp.arange((num_rows + len(sizes) * (block - 1)) // block, dtype=jnp.int32)
    groups = jnp.sum(tiles[:, None] >= tile_ends[None, :-1], axis=1, dtype=jnp.int32)
    ends = row_ends[groups]
    return RowTiles(groups, ends - sizes[groups] + (tiles - (tile_ends - tiles_of_group)[groups]) * block, ends)


def _multiply_rows(
    rows: Float[Array, "R K"],
    weights: Float[Array, "E _ _"],
    sizes: Int[Array, "E"],
    interpret: bool,
    *,
    transposed: bool,
) -> Float[Array, "R N"]:
    """Multiplies each row by its group's matrix [K, N], or by the transpose of its matrix [N, K]."""
    num_rows, num_columns = len(rows), weights.shape[1 if transposed else 2]
    block, columns = row_block(num_rows, len(sizes)), _column_block(num_columns)
    tiles = row_tiles(sizes, num_rows, block)
    out = jax.ShapeDtypeStruct((num_rows, num_columns), rows.dtype)
    return pl.pallas_call(
        partial(_multiply_tile, num_rows=block, num_columns=columns, transposed=transposed),
        out_shape=out,
        grid=(pl.cdiv(num_columns, columns), len(tiles.groups)),
        compiler_params=_compiler_params(block),
        cost_estimate=_cost(rows, weights, out),
        interpret=interpret,
    )(*tiles, rows, weights)


def _multiply_tile(*refs: Any, num_rows: int, num_columns: int, transposed: bool) -> None:
    """Computes one tile of the product."""
    groups, starts, ends, rows, weights, out = refs
    tile = pl.program_id(1)
    group, start, end = groups[tile], starts[tile], ends[tile]
    own_rows, is_row = _indices(start, num_rows, end)
    own_columns, is_column = _indices(pl.program_id(0) * num_columns, num_columns, out.shape[1])
    num_summed = _summed_block(rows.dtype)

    def add(step: Array, total: Array) -> Array:
        own_summed, is_summed = _indices(step * num_summed, num_summed, rows.shape[1])
        block = _load(rows.at[own_rows, own_summed], is_row, is_summed)
        if transposed:
            matrix = _load(weights.at[group, own_columns, own_summed], is_column, is_summed).T
        else:
            matrix = _load(weights.at[group, own_summed, own_columns], is_summed, is_column)
        return total + _dot(block, matrix)

    is_used = (group < weights.shape[0]) & (start < end)
    num_steps = is_used.astype(jnp.int32) * pl.cdiv(rows.shape[1], num_summed)
    total = lax.fori_loop(0, num_steps, add, jnp.zeros((num_rows, num_columns), jnp.float32))
    _store(out.at[own_rows, own_columns], total, is_row, is_column)


def _sum_outer_products(
    left: Float[Array, "R O"], right: Float[Array, "R I"], sizes: Int[Array, "E"], interpret: bool
) -> Float[Array, "E O I"]:
    """Sums the outer products of each group's rows; a group without rows gets zeros."""
    shape = len(sizes), left.shape[1], right.shape[1]
    blocks = _column_block(shape[1]), _column_block(shape[2])
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    out = jax.ShapeDtypeStruct(shape, right.dtype)
    return pl.pallas_call(
        partial(_sum_tile, blocks=blocks),
        out_shape=out,
        grid=(pl.cdiv(shape[2], blocks[1]), pl.cdiv(shape[1], blocks[0]), len(sizes)),
        compiler_params=_compiler_params(blocks[0]),
        cost_estimate=_cost(left, right, out),
        interpret=interpret,
    )(ends - sizes, ends, left, right)


def _sum_tile(starts: Any, ends: Any, left: Any, right: Any, out: Any, *, blocks: tuple[int, int]) -> None:
    """Computes one tile of a group's sum."""
    group = pl.program_id(2)
    start, end = starts[group], ends[group]
    num_left, num_right = blocks
    own_left, is_left = _indices(pl.program_id(1) * num_left, num_left, left.shape[1])
    own_right, is_right = _indices(pl.program_id(0) * num_right, num_right, right.shape[1])
    num_rows = _summed_block(left.dtype)

    def add(step: Array, total: Array) -> Array:
        own_rows, is_row = _indices(start + step * num_rows, num_rows, end)
        a = _load(left.at[own_rows, own_left], is_row, is_left)
        b = _load(right.at[own_rows, own_right], is_row, is_right)
        return total + _dot(a.T, b)

    total = lax.fori_loop(0, pl.cdiv(end - start, num_rows), add, jnp.zeros(blocks, jnp.float32))
    _store(out.at[group, own_left, own_right], total, is_left, is_right)


def _column_block(num_columns: int) -> int:
    return min(MAX_BLOCK, max(MIN_BLOCK, pl.next_power_of_2(num_columns)))


def _summed_block(dtype: Any) -> int:
    return _SUMMED_BYTES // jnp.dtype(dtype).itemsize


def _compiler_params(num_rows: int) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=8 if num_rows == MAX_BLOCK else 4, num_stages=_NUM_STAGES)


def _cost(left: Array, right: Array, out: jax.ShapeDtypeStruct) -> pl.CostEstimate:
    """Returns the work that is needed, for `satellites.planning.counting`; partly empty tiles take more."""
    moved = sum(each.size * each.dtype.itemsize for each in (left, right, out))
    return pl.CostEstimate(flops=2 * left.size * out.shape[-1], transcendentals=0, bytes_accessed=moved)


def _indices(start: Any, size: int, end: Any) -> tuple[Any, Bool[Array, "size"]]:
    """Returns the slice of a block's indices along a dim, and which of them are before the end."""
    return pl.ds(start, size), start + jnp.arange(size) < end


def _load(ref: Any, is_row: Array, is_column: Array) -> Array:
    return triton.load(ref, mask=is_row[:, None] & is_column[None, :], other=0)


def _store(ref: Any, total: Array, is_row: Array, is_column: Array) -> None:
    triton.store(ref, total.astype(ref.dtype), mask=is_row[:, None] & is_column[None, :])


def _dot(a: Array, b: Array) -> Float[Array, "rows columns"]:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
