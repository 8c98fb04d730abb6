"""4-bit NormalFloat quantization with double quantization (arXiv:2305.14314), in bitsandbytes' layout and files.

64 consecutive numbers of a matrix share a scale, their largest magnitude. Each 256 scales are in turn quantized to
8 bits, by a dynamic map with a scale of its own. That takes 0.516 bytes per number.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8
from safetensors import SafetensorError

from groupax.core.storage.model_json import is_number
from groupax.core.terminal.printable import short_repr
from groupax.parallel.collectives import to_device
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
    numbers = _code_numbers(codes) * scales[:, None]
    return numbers.reshape(-1)[: rows * columns].reshape(rows, columns).astype(dtype)


def _code_numbers(codes: UInt8[Array, "N B"]) -> Float[Array, "N B"]:
    """Returns CODE[codes] by selecting on the bits, which compilers vectorize; a table lookup becomes a loop."""
    numbers = [jnp.float32(number) for number in CODE]
    for bit in range(4):
        is_set = (codes >> bit) & 1 == 1
        numbers = [jnp.where(is_set, odd, even) for even, odd in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]


# Suffixes, after a weight's name, of the further tensors of a quantized weight.
_SCALES, _CODE = "absmax", "quant_map"
_SCALE_SCALES, _SCALE_CODE = "nested_absmax", "nested_quant_map"
_STATE = "quant_state.bitsandbytes__nf4"
FURTHER = (_SCALES, _CODE, _SCALE_SCALES, _SCALE_CODE, _STATE)


def quantization_config(dtype: str, skipped: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the `quantization_config` of `config.json`.

    Args:
        dtype: Dtype in which transformers should compute.
        skipped: Modules with matrices that are not in 4 bits, besides the head.
    """
    others = {"llm_int8_skip_modules": ["lm_head", *skipped]} if skipped else {}
    return others | {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
    }


def is_nf4(quantization: Any) -> bool:
    """Checks for a `quantization_config` that groupax can read: nf4 with double quantization."""
    return isinstance(quantization, Mapping) and all(
        quantization.get(key) == value
        for key, value in quantization_config("").items()
        if key in ("quant_method", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    )


def without_nf4(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Removes a readable `quantization_config` from the contents of a `config.json`; others stay."""
    is_read_here = is_nf4(hf_config.get("quantization_config"))
    return {key: value for key, value in hf_config.items() if key != "quantization_config" or not is_read_here}


def nf4_tensors(name: str, weight: Nf4, dtype: str) -> dict[str, np.ndarray]:
    """Returns the tensors of one weight by name."""
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": dtype,
        "shape": list(weight.shape),
        "nested_blocksize": SCALE_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": float(np.asarray(weight.offset)),
    }
    return {
        name: np.asarray(weight.codes).reshape(-1, 1),
        f"{name}.{_SCALES}": np.asarray(weight.scales),
        f"{name}.{_CODE}": np.array(CODE, np.float32),
        f"{name}.{_SCALE_SCALES}": np.asarray(weight.scale_scales),
        f"{name}.{_SCALE_CODE}": scale_code(),
        f"{name}.{_STATE}": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def read_nf4(name: str, shape: tuple[int, ...], get: Callable[[str], np.ndarray], sharding: Any) -> Nf4:
    """Reads one weight.

    Raises:
        ValueError: The layout differs from that of `nf4_tensors`, or the weight is damaged.
    """
    num = math.prod(shape)
    num_scales = -(-num // BLOCK)
    sizes = {
        name: (np.uint8, -(-num // 2)),
        f"{name}.{_SCALES}": (np.uint8, num_scales),
        f"{name}.{_CODE}": (np.float32, len(CODE)),
        f"{name}.{_SCALE_SCALES}": (np.float32, -(-num_scales // SCALE_BLOCK)),
        f"{name}.{_SCALE_CODE}": (np.float32, len(scale_code())),
    }
    try:
        state = json.loads(bytes(get(f"{name}.{_STATE}")))
        arrays = {part: get(part) for part in sizes}
    except (KeyError, ValueError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{name} is not a 4-bit weight with double quantization: {error}") from error
    state = state if isinstance(state, dict) else {}
    if (state.get("blocksize"), state.get("nested_blocksize")) != (BLOCK, SCALE_BLOCK):
        raise ValueError(f"{name} is not quantized to nf4 in blocks of {BLOCK} and {SCALE_BLOCK}: {short_repr(state)}")
    if state.get("shape") != list(shape):
        raise ValueError(f"{name} has shape {short_repr(state.get('shape'))}, config.json says {list(shape)}")
    for part, (dtype, size) in sizes.items():
        if arrays[part].dtype != dtype or arrays[part].size != size:
            raise ValueError(
                f"{part} has {arrays[part].size} numbers of {arrays[part].dtype}; a weight of this shape has {size} of "
                f"{np.dtype(dtype).name}"
            )
    codes, scales, code, scale_scales, scales_code = arrays.values()
    if not (np.allclose(code, np.array(CODE), atol=1e-6) and np.allclose(scales_code, scale_code(), atol=1e-6)):
        raise ValueError(f"{name} is quantized with a code that is not nf4's")
    if not is_number(state.get("nested_offset")) or not np.isfinite(scale_scales).all():
        raise ValueError(f"{name} has scales that are not finite; the file is damaged")
    offset = np.float32(state["nested_offset"])
    return to_device(Nf4(codes.reshape(shape[0], -1), scales.reshape(-1), scale_scales.reshape(-1), offset), sharding)
