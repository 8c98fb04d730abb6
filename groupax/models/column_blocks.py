"""Products over the columns of a cache by blocks, so that further columns which are masked change no bit of a result.

The order in which a processor adds up a product depends on its shape. Here each product has one block of columns, and
the sums of blocks are added up in their order; a masked block adds 0.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from groupax.models.matmul import matmul

BLOCK = 128


def key_scores(q: Float[Array, "*B M H"], keys: Float[Array, "*B H S"]) -> Float[Array, "*B M S"]:
    """Computes q keys in float32; in one product if S is not a multiple of a block."""
    S = keys.shape[-1]
    if S % BLOCK:
        return matmul(q, keys)
    blocks = (keys[..., first : first + BLOCK] for first in range(0, S, BLOCK))
    return jnp.concatenate([matmul(q, block) for block in blocks], axis=-1)


def weighted_values(weights: Float[Array, "*B M S"], values: Float[Array, "*B S H"]) -> Float[Array, "*B M H"]:
    """Computes the weighted sum of values in float32; in one product if S is not a multiple of a block."""
    *lead, M, S = weights.shape
    if S % BLOCK or S == BLOCK:
        return matmul(weights, values)
    by_block = weights.reshape(*lead, M, S // BLOCK, BLOCK).swapaxes(-3, -2)
    return jnp.sum(matmul(by_block, values.reshape(*lead, S // BLOCK, BLOCK, values.shape[-1])), axis=-3)


def total_weights(weights: Float[Array, "*B M S"]) -> Float[Array, "*B M 1"]:
    """Computes the sum of weights in float32, as that of the values 1."""
    *lead, _, S = weights.shape
    return weighted_values(weights, jnp.ones((*lead, S, 1), weights.dtype))
