"""Products with matrices of 4-bit numbers, as a kernel for NVIDIA GPUs that never writes the numbers to memory.

XLA would write each matrix in the dtype of its product and read it again: for few rows, as in decoding, that takes nine
times as long as reading the 4-bit numbers. In this kernel, written in Pallas for Triton, a program unpacks the codes of
a block of the matrix's rows as it goes along them. The two codes of a byte are multiplied separately, the first one by
the even inputs and the second one by the odd ones, so that nothing is interleaved.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float

from groupax.models.weights.nf4 import BLOCK, SCALE_BLOCK, Nf4, code_numbers, scale_code

# Rows up to which the matrix is read once or twice; for more of them it pays to write it to memory.
MAX_ROWS = 256
_MIN_ROWS, _MOST_ROWS, _NUM_OUTPUTS = 16, 64, 32  # of a tile
_BYTES = BLOCK // 2  # of a block, which share a scale
# Bytes of the inputs in a row of a tile for each half of a byte's codes. Two stages of 64 rows take 64 KiB of shared
# memory, of which GPUs of compute capability 8.6 and 8.9 have 99 KiB per kernel.
_INPUT_BYTES, _NUM_STAGES = 256, 2


def can_multiply(x: Float[Array, "M I"], weight: Nf4) -> bool:
    """Checks whether the kernel is for these shapes: few rows, and scales that are not shared across matrix rows."""
    return len(x) <= MAX_ROWS and weight.shape[1] % BLOCK == 0


def nf4_matmul_nt(x: Float[Array, "M I"], weight: Nf4, interpret: bool = False) -> Float[Array, "M O"]:
    """Computes x weightᵀ in x's dtype, with the matrix's numbers rounded to that dtype and sums in float32.

    Args:
        x: Inputs; I is a multiple of 64.
        weight: The matrix [O, I].
        interpret: Whether to emulate the kernel, on any device.
    """
    (M, num_inputs), num_outputs = x.shape, weight.shape[0]
    num_rows = min(_MOST_ROWS, max(_MIN_ROWS, pl.next_power_of_2(M)))
    out = jax.ShapeDtypeStruct((M, num_outputs), x.dtype)
    read = sum(each.size * each.dtype.itemsize for each in (weight.codes, weight.scales, x, out))
    return pl.pallas_call(
        partial(_multiply_tile, num_rows=num_rows),
        out_shape=out,
        grid=(pl.cdiv(num_outputs, _NUM_OUTPUTS), pl.cdiv(M, num_rows)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=_NUM_STAGES),
        cost_estimate=pl.CostEstimate(flops=2 * x.size * num_outputs, transcendentals=0, bytes_accessed=read),
        interpret=interpret,
        name="nf4_matmul",
    )(
        x.reshape(M, num_inputs // 2, 2).transpose(2, 0, 1),
        weight.codes,
        weight.scales.reshape(num_outputs, num_inputs // BLOCK),
        jnp.asarray(scale_code()),
        weight.scale_scales,
        weight.offset.reshape(1),
    )


def _multiply_tile(
    halves: Any,
    codes: Any,
    scales: Any,
    scale_numbers: Any,
    scale_scales: Any,
    offset: Any,
    out: Any,
    *,
    num_rows: int,
) -> None:
    """Computes one tile of the product."""
    outputs, own_outputs, is_output = _indices(pl.program_id(0), _NUM_OUTPUTS, out.shape[1])
    _, own_rows, is_row = _indices(pl.program_id(1), num_rows, out.shape[0])
    num_blocks = scales.shape[1]
    at_once = _INPUT_BYTES // (_BYTES * halves.dtype.itemsize)

    def add(step: Array, total: Array) -> Array:
        blocks, own_blocks, is_block = _indices(step, at_once, num_blocks)
        _, own_bytes, is_byte = _indices(step, at_once * _BYTES, codes.shape[1])
        is_scale = is_output[:, None] & is_block[None, :]
        scale = triton.load(scales.at[own_outputs, own_blocks], mask=is_scale, other=0).astype(jnp.int32)
        group = (outputs[:, None] * num_blocks + blocks[None, :]) // SCALE_BLOCK
        of_scale = triton.load(scale_scales.at[group], mask=is_scale, other=0)
        scale = triton.load(scale_numbers.at[scale]) * of_scale + offset[0]
        scale = jnp.broadcast_to(scale[:, :, None], (*scale.shape, _BYTES)).reshape(_NUM_OUTPUTS, -1)
        is_code = is_output[:, None] & is_byte[None, :]
        packed = triton.load(codes.at[own_outputs, own_bytes], mask=is_code, other=0).astype(jnp.int32)
        is_input = is_row[:, None] & is_byte[None, :]
        for half, own_codes in enumerate((packed >> 4, packed & 15)):
            matrix = (code_numbers(own_codes) * scale).astype(halves.dtype)
            inputs = triton.load(halves.at[jnp.int32(half), own_rows, own_bytes], mask=is_input, other=0)
            total += _dot_nt(inputs, matrix)
        return total

    start = jnp.zeros((num_rows, _NUM_OUTPUTS), jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(num_blocks, at_once), add, start)
    triton.store(out.at[own_rows, own_outputs], total.astype(out.dtype), mask=is_row[:, None] & is_output[None, :])


def _indices(block: Any, size: int, end: int) -> tuple[Array, Any, Bool[Array, "size"]]:
    """Returns a block's indices along a dim, the slice of them, and which of them are before the end."""
    indices = block * size + jnp.arange(size)
    return indices, pl.ds(block * size, size), indices < end


def _dot_nt(a: Array, b: Array) -> Float[Array, "rows columns"]:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b.T, precision=precision, preferred_element_type=jnp.float32)
