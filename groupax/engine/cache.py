"""The key-value cache: per layer, S columns for each slot, one column per token that the slot has fed.

All slots are aligned at their ends: the next column to be written is the same for all, so that writing it is one
update in place. A slot that started later, or with a shorter prompt, starts at a later column; what lies before is
hidden. When the columns run out, the whole cache is moved to the left over columns that no running slot needs, or
made larger, so that its size follows the longest running sequence.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from groupax.models.config import ModelConfig
from groupax.pytree import pytree


@pytree
class Cache:
    """What B slots fed, in S columns: the tokens, and per layer their keys and values.

    Keys lie with their columns last (see `attend_cached`).
    """

    tokens: Int[Array, "B S"]
    k: list[Float[Array, "B K H S"]]
    v: list[Float[Array, "B K S H"]]

    @property
    def num_columns(self) -> int:
        """S: how many tokens a slot can hold."""
        return self.k[0].shape[3]


def bucket(size: int, smallest: int) -> int:
    """The smallest of 1, 1.5, 2, 3, 4, 6, 8, ... times `smallest` that is at least `size`, so that sizes are few."""
    step = smallest
    while True:
        for candidate in (step, step + step // 2):
            if candidate >= size:
                return candidate
        step *= 2


def empty_cache(config: ModelConfig, num_slots: int, num_columns: int, dtype: jnp.dtype) -> Cache:
    """A cache of zeros."""
    K, H = config.num_kv_heads, config.head_dim
    return Cache(
        tokens=jnp.zeros((num_slots, num_columns), jnp.int32),
        k=[jnp.zeros((num_slots, K, H, num_columns), dtype) for _ in range(config.num_layers)],
        v=[jnp.zeros((num_slots, K, num_columns, H), dtype) for _ in range(config.num_layers)],
    )


def moved(cache: Cache, num_columns: int, shift: Int[Array, ""]) -> Cache:
    """The cache with `num_columns` columns, its contents moved by `shift` columns (to the right if positive).

    What is moved out at one end comes in at the other, where it must be hidden or be overwritten.
    """
    added = num_columns - cache.num_columns

    def move(x: Array, axis: int) -> Array:
        widths = [(0, added if dim == axis else 0) for dim in range(x.ndim)]
        return jnp.roll(jnp.pad(x, widths), shift, axis)

    return Cache(move(cache.tokens, 1), k=[move(k, 3) for k in cache.k], v=[move(v, 2) for v in cache.v])
