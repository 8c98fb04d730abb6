"""Quantized weights: for decoding, whose steps mostly read weights, and for the base of an adapter.

A quantized weight is qwix's `QArray`, integers or 8-bit floats with a scale per output, or an `Nf4`; `layers.linear`
applies both.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from groupax.core.errors import require
from groupax.core.settings.compute import DecodingWeights
from groupax.models.adapted import AdaptedWeight
from groupax.models.config import ModelConfig
from groupax.models.decoder import head_weights
from groupax.models.params import weight_dtype
from groupax.models.specs import Params, model_specs
from groupax.models.weights.nf4 import Nf4, dequantize_nf4, quantize_nf4

# "same" leaves weights as they are.
_QTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}


def decoding_params(config: ModelConfig, params: Params, dtype: str) -> Params:
    """Converts weights for decoding: unchanged, in bfloat16, or with their matrices in 8 bits.

    Under quantization norms, biases, routers, experts, the embedding and low-rank changes keep their dtype; a tied head
    becomes a separate quantized weight. Each output of a matrix has its own scale, which maps its largest weight to the
    type's largest number.

    Raises:
        ImportError, ValueError: See `check_decoding_weights`.
    """
    check_decoding_weights(params, dtype)
    return params if dtype == "same" else _converter(config, dtype)(params)


def check_decoding_weights(params: Params, dtype: str) -> None:
    """Checks that `decoding_params` can convert the weights, before anything is computed.

    Raises:
        ImportError: 8 bits are requested and qwix is not installed.
        ValueError: The dtype is unknown, or the weights are quantized already.
    """
    if dtype not in get_args(DecodingWeights):
        raise ValueError(f"weights to decode with must be one of {', '.join(get_args(DecodingWeights))}, got {dtype!r}")
    if dtype != "same" and is_quantized(params):
        raise ValueError(f"the weights are quantized already; decode with them as they are ('same', not {dtype!r})")
    if dtype not in ("same", "bfloat16"):
        quantizer(dtype)


@lru_cache(maxsize=16)
def _converter(config: ModelConfig, dtype: str) -> Callable[[Params], Params]:
    if dtype == "bfloat16":
        return jax.jit(partial(cast_unquantized, dtype=jnp.bfloat16))
    quantize = quantizer(dtype)

    def convert_matrix(weight: Any) -> Any:
        return replace(weight, base=quantize(weight.base)) if isinstance(weight, AdaptedWeight) else quantize(weight)

    def convert(params: Params) -> Params:
        specs = model_specs(config)["layers"]
        layers = [
            {name: convert_matrix(weight) if spec[name].is_matrix else weight for name, weight in layer.items()}
            for layer, spec in zip(params["layers"], specs, strict=True)
        ]
        return {**params, "layers": layers, "head": quantize(head_weights(params))}

    return jax.jit(convert)


def require_quantizer(kind: str) -> None:
    """Raises a `MissingPackageError` if weights of this format cannot be made; for before a model is loaded."""
    if kind in _QTYPES:
        require("quantize", f"weights={kind!r}")


def quantizer(kind: str) -> Callable[[Array], Any]:
    """Returns the function that quantizes a matrix to "int8", "float8" or "nf4".

    Raises:
        ImportError: 8 bits are requested and qwix is not installed.
    """
    if kind == "nf4":
        return quantize_nf4
    require_quantizer(kind)
    import qwix

    return lambda weight: qwix.quantize(weight, _QTYPES[kind], channelwise_axes=[0])


def is_quantized(params: Any) -> bool:
    """Checks whether any of the weights is quantized."""
    return any(_is_quantized_weight(x) for x in jax.tree.leaves(params, is_leaf=_is_quantized_weight))


def _is_quantized_weight(weight: Any) -> bool:
    return isinstance(weight, Nf4) or hasattr(weight, "qvalue")


def cast_unquantized(params: Params, dtype: Any) -> Params:
    """Casts the weights to a dtype, except quantized ones; arrays that have the dtype already are not copied."""

    def cast(path: tuple[Any, ...], x: Any) -> Any:
        is_kept = _is_quantized_weight(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return x if is_kept else x.astype(weight_dtype(path, dtype))

    return jax.tree_util.tree_map_with_path(cast, params, is_leaf=_is_quantized_weight)


def dense(weight: Any, dtype: Any) -> Float[Array, "..."]:
    """Dequantizes a weight and adds its low-rank change, in float32, then casts it."""
    if isinstance(weight, AdaptedWeight):
        change = jnp.einsum("or,ri->oi", weight.change.b.astype(jnp.float32), weight.change.a.astype(jnp.float32))
        return (dense(weight.base, jnp.float32) + weight.scale * change).astype(dtype)
    if isinstance(weight, Nf4):
        return dequantize_nf4(weight, dtype)
    if hasattr(weight, "qvalue"):
        return (weight.qvalue.astype(jnp.float32) * weight.scale.astype(jnp.float32)).astype(dtype)
    return weight.astype(dtype)


def dense_params(params: Params, dtype: Any) -> Params:
    """Converts all weights to plain arrays (see `dense`), which merges an adapter into its base."""

    def is_weight(x: Any) -> bool:
        return isinstance(x, AdaptedWeight) or _is_quantized_weight(x)

    return jax.tree.map(lambda weight: dense(weight, dtype), params, is_leaf=is_weight)
