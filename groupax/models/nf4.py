"""4-bit NormalFloat quantization with double quantization (arXiv:2305.14314), in bitsandbytes' layout.

64 consecutive numbers of a matrix share a scale, their largest magnitude. Each 256 scales are in turn quantized to
8 bits, by a dynamic map with a scale of its own. That takes 0.516 bytes per number. qwix's "nf4" has no double
quantization and takes a byte per number.
"""

import math
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from groupax.parallel.pytree import pytree

BLOCK = 64
SCALE_BLOCK = 256
# Replaces 0 as a divisor; its inverse is finite even on devices that flush numbers below 1.2e-38 to zero.
TINY = 1e-30
# Quantiles of a normal distribution scaled to [-1, 1], with an exact 0 (appendix E of the paper).
CODE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)  # fmt: skip


@pytree
class Nf4:
    """A matrix [O, I] of 4-bit numbers in N blocks of 64, in row-major order; I = 2 J.

    Attributes:
        codes: Indices into `CODE`, two per byte, the first one in the upper half.
        scales: Scales of the blocks, as indices into `scale_code`.
        scale_scales: Scale of each 256 scales.
        offset: Mean of the scales, which was subtracted before they were quantized.
    """

    codes: UInt8[Any, "O J"]
    scales: UInt8[Any, "N"]
    scale_scales: Float[Any, "S"]
    offset: Float[Any, ""]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return self.codes.shape[0], 2 * self.codes.shape[1]


@lru_cache(maxsize=1)
def scale_code() -> Float[np.ndarray, "256"]:
    """Returns the signed dynamic 8-bit map: 7 decades below 1, each with twice the numbers of the one below it.

    Source: arXiv:1511.04561, as in bitsandbytes' `create_dynamic_map`.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        ends = _spaced(2**decade + 1)
        magnitudes = np.float32(10.0 ** (decade - 6)) * ((ends[:-1] + ends[1:]) / np.float32(2.0))
        numbers += [*magnitudes.tolist(), *(-magnitudes).tolist()]
    return np.array(sorted(numbers), np.float32)


def _spaced(num: int) -> Float[np.ndarray, "E"]:
    """Computes torch.linspace(0.1, 1.0, num) to the bit: PyTorch steps from the nearer end and rounds once."""
    low, high, index = np.float32(0.1), np.float32(1.0), np.arange(num)
    step = float((high - low) / np.float32(num - 1))
    return np.where(index < num // 2, low.item() + step * index, high.item() - step * (num - 1 - index)).astype(
        np.float32
    )


def nf4_bytes(shape: tuple[int, ...]) -> int:
    """Computes the bytes of a quantized matrix of this shape."""
    size = math.prod(shape)
    num_blocks = -(-size // BLOCK)
    return size // 2 + num_blocks + 4 * -(-num_blocks // SCALE_BLOCK) + 4


def quantize_nf4(weight: Float[Array, "O I"]) -> Nf4:
    """Quantizes a matrix to the nearest numbers of the code, relative to the largest magnitude of each block.

    Raises:
        ValueError: The matrix has an odd number of columns.
    """
    rows, columns = weight.shape
    if columns % 2:
        raise ValueError(
            f"a matrix of {rows} x {columns} cannot be packed into 4 bits: it has an odd number of columns"
        )
    num_blocks = -(-rows * columns // BLOCK)
    flat = jnp.pad(weight.astype(jnp.float32).reshape(-1), (0, num_blocks * BLOCK - rows * columns)).reshape(
        num_blocks, BLOCK
    )
    largest = jnp.max(jnp.abs(flat), axis=1)
    relative = flat * (1.0 / jnp.maximum(largest, TINY))[:, None]
    code = np.array(CODE, np.float32)
    codes = jnp.zeros(relative.shape, jnp.uint8)
    for bound in (code[:-1] + code[1:]) / np.float32(2.0):
        codes = codes + (relative > bound).astype(jnp.uint8)
    pairs = codes.reshape(-1)[: rows * columns].reshape(rows, columns // 2, 2)
    offset = jnp.mean(largest)
    centered = largest - offset
    num_groups = -(-num_blocks // SCALE_BLOCK)
    groups = jnp.pad(centered, (0, num_groups * SCALE_BLOCK - num_blocks)).reshape(num_groups, SCALE_BLOCK)
    scale_scales = jnp.max(jnp.abs(groups), axis=1)
    of_group = groups / jnp.maximum(scale_scales, TINY)[:, None]
    numbers = scale_code()
    bounds = jnp.asarray((numbers[:-1] + numbers[1:]) / np.float32(2.0))
    scales = jnp.searchsorted(bounds, of_group.reshape(-1)[:num_blocks]).astype(jnp.uint8)
    return Nf4(pairs[..., 0] << 4 | pairs[..., 1], scales, scale_scales, offset)


def dequantize_nf4(weight: Nf4, dtype: Any) -> Float[Array, "O I"]:
    """Returns the matrix in this dtype."""
    rows, columns = weight.shape
    num_blocks = weight.scales.shape[0]
    of_scale = jnp.repeat(weight.scale_scales, SCALE_BLOCK)[:num_blocks]
    scales = jnp.asarray(scale_code())[weight.scales.astype(jnp.int32)] * of_scale + weight.offset
    codes = jnp.stack([weight.codes >> 4, weight.codes & 15], axis=-1).reshape(-1)
    codes = jnp.pad(codes, (0, num_blocks * BLOCK - codes.shape[0])).reshape(num_blocks, BLOCK)
    numbers = code_numbers(codes) * scales[:, None]
    return numbers.reshape(-1)[: rows * columns].reshape(rows, columns).astype(dtype)


def code_numbers(codes: Int[Array, "N B"] | UInt8[Array, "N B"]) -> Float[Array, "N B"]:
    """Returns CODE[codes] by selecting on the bits, which compilers vectorize; a table lookup becomes a loop."""
    numbers = [jnp.float32(number) for number in CODE]
    for bit in range(4):
        is_set = (codes >> bit) & 1 == 1
        numbers = [jnp.where(is_set, odd, even) for even, odd in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]
