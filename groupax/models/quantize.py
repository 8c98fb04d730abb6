"""Weights in fewer bits, for decoding: what a step reads is mostly weights.

A quantized weight is qwix's `QArray`, integers or 8-bit floats with a scale per output; `layers.linear` multiplies it.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, get_args

import jax
import jax.numpy as jnp

from groupax.config import DecodingWeights
from groupax.models.config import ModelConfig
from groupax.models.decoder import head_weights
from groupax.models.specs import Params, model_specs

# "same" leaves weights as they are.
_QTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}


def decoding_params(config: ModelConfig, params: Params, dtype: str) -> Params:
    """The weights to decode with: as they are, in bfloat16, or with their matrices in 8 bits.

    Norms, biases, routers and experts keep their dtype under quantization, and so does the embedding; a head that is
    tied to it becomes a quantized one of its own. Every output of a matrix has its own scale, which makes its largest
    weight the type's largest number.

    Raises:
        ImportError: 8 bits are asked for and qwix is not installed.
        ValueError: there is no such dtype.
    """
    if dtype not in get_args(DecodingWeights):
        raise ValueError(f"weights to decode with must be one of {', '.join(get_args(DecodingWeights))}, got {dtype!r}")
    return params if dtype == "same" else _converter(config, dtype)(params)


@lru_cache(maxsize=16)
def _converter(config: ModelConfig, dtype: str) -> Callable[[Params], Params]:
    if dtype == "bfloat16":
        return jax.jit(lambda params: jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    try:
        import qwix
    except ImportError as error:
        raise ImportError(f"weights in {dtype} need qwix: pip install 'groupax[quantize]'") from error

    def quantized(weight: Any) -> Any:
        return qwix.quantize(weight, _QTYPES[dtype], channelwise_axes=[0])

    def convert(params: Params) -> Params:
        specs = model_specs(config)["layers"]
        layers = [
            {name: quantized(weight) if spec[name].is_matrix else weight for name, weight in layer.items()}
            for layer, spec in zip(params["layers"], specs, strict=True)
        ]
        return {**params, "layers": layers, "head": quantized(head_weights(params))}

    return jax.jit(convert)
