"""The format of 4-bit weights on disk that bitsandbytes and transformers write and read."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError

from groupax.models.nf4 import BLOCK, CODE, SCALE_BLOCK, Nf4, scale_code
from groupax.parallel.collectives import to_device
from groupax.storage.model_json import is_number
from groupax.terminal.printable import short_repr

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

    Args:
        name: Name of the weight.
        shape: Expected shape.
        get: Function that returns a tensor by name.
        sharding: Sharding of the result.

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
