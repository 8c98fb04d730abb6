"""Weights in other dtypes: casts that leave quantized ones alone, and plain arrays made of any weights."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from groupax.models.adapted import AdaptedWeight, dense
from groupax.models.params import weight_dtype
from groupax.models.specs import Params
from groupax.models.weights.nf4 import Nf4


def is_quantized(params: Any) -> bool:
    """Checks whether any of the weights is quantized."""
    return any(map(_is_nf4, jax.tree.leaves(params, is_leaf=_is_nf4)))


def _is_nf4(weight: Any) -> bool:
    return isinstance(weight, Nf4)


def cast_unquantized(params: Params, dtype: Any) -> Params:
    """Casts the weights to a dtype, except quantized ones; arrays that have the dtype already are not copied."""

    def cast(path: tuple[Any, ...], x: Any) -> Any:
        is_kept = _is_nf4(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return x if is_kept else x.astype(weight_dtype(path, dtype))

    return jax.tree_util.tree_map_with_path(cast, params, is_leaf=_is_nf4)


# A copy of the weights for decoding in bfloat16, as one program.
bfloat16_params = jax.jit(partial(cast_unquantized, dtype=jnp.bfloat16))


def dense_params(params: Params, dtype: Any) -> Params:
    """Converts all weights to plain arrays (see `dense`), which merges an adapter into its base."""

    def is_weight(x: Any) -> bool:
        return isinstance(x, AdaptedWeight) or _is_nf4(x)

    return jax.tree.map(lambda weight: dense(weight, dtype), params, is_leaf=is_weight)
