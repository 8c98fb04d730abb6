"""The 4-bit weights of experts in gpt-oss checkpoints (mxfp4), which are dequantized as they are read.

Two tensors have a weight: blocks, each byte of which has two numbers of 4 bits, the first one in its lower half, and
the exponent of each 32 numbers, in 8 bits. Source: OCP Microscaling Formats Specification 1.0, sections 5.2 and 5.3.
"""

import jax.numpy as jnp
import numpy as np

from groupax.models.weights.tensor_files import Tensor, Tensors

_BLOCKS, _SCALES = "_blocks", "_scales"
# The sixteen numbers of 4 bits: a sign, two bits of exponent and one of mantissa.
_CODE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# The factors of the 256 scales, powers of two.
_FACTORS = np.append(np.ldexp(np.float32(1.0), np.arange(255) - 127), np.float32(np.nan))


def dequantized_tensors(tensors: Tensors) -> Tensors:
    """Returns tensors by the names of the weights, with those of 4 bits as tensors that dequantize what is read.

    Raises:
        ValueError: A weight has blocks without scales, or of other shapes or dtypes.
    """
    names = [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]
    lacking = [name for name in names if name + _SCALES not in tensors]
    if lacking:
        raise ValueError(f"{tensors[lacking[0] + _BLOCKS].path} has {lacking[0]}{_BLOCKS}, but there are no scales")
    quantized = {name + suffix for name in names for suffix in (_BLOCKS, _SCALES)}
    whole = {name: each for name, each in tensors.items() if name not in quantized}
    return whole | {name: _dequantized(tensors[name + _BLOCKS], tensors[name + _SCALES], name) for name in names}


def _dequantized(blocks: Tensor, scales: Tensor, name: str) -> Tensor:
    """Returns a weight [E, I, O] in bfloat16, which has all its numbers.

    It is stored as blocks [E, O, I / 32, 16] and scales [E, O, I / 32].
    """
    shape = blocks.shape
    if len(shape) != 4 or shape[3] != 16 or scales.shape != shape[:3]:
        raise ValueError(
            f"{name} has blocks of shape {list(shape)} and scales of shape {list(scales.shape)}; 4-bit weights need "
            "[E, O, G, 16] and [E, O, G]"
        )
    if (dtypes := (blocks.dtype, scales.dtype)) != ("U8", "U8"):
        raise ValueError(f"{name} has blocks and scales of dtypes {dtypes}; 4-bit weights need U8")

    def read(index: tuple[slice, ...]) -> np.ndarray:
        expert, inputs, outputs = index
        first, end, _ = inputs.indices(32 * shape[2])
        groups = slice(first // 32, -(-end // 32))
        part = expert, outputs, groups
        weight = dequantize(blocks.read((*part, slice(None))), scales.read(part))
        return weight[:, :, first - 32 * groups.start : end - 32 * groups.start].swapaxes(1, 2)

    return Tensor((shape[0], 32 * shape[2], shape[1]), "BF16", read, blocks.files + scales.files)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the numbers of blocks [E, O, G, 16] with scales [E, O, G] as bfloat16 [E, O, 32 G], expert by expert.

    A scale of 255 stands for NaN, and numbers beyond the range of bfloat16 become infinite; loading refuses both.
    """
    E, O, G, _ = blocks.shape  # noqa: E741 - the dim of outputs
    weight = np.empty((E, O, G, 16, 2), jnp.bfloat16)
    code = _CODE.astype(jnp.bfloat16)
    for out, block, scale in zip(weight, blocks, scales, strict=True):
        factor = _FACTORS[scale][..., None]
        for half, nibbles in enumerate((block & 0x0F, block >> 4)):
            np.multiply(code[nibbles].astype(np.float32), factor, out=out[..., half], casting="unsafe")
    return weight.reshape(E, O, 32 * G)
