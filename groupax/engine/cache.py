"""The key-value cache: prompts apart from what follows them.

A prompt's columns lie once for all slots of its place: R neighbouring slots that continue the same prompt read them
together. Behind it each slot has columns of its own, one per token that it has fed, its prompt's last token first. All
slots are aligned at their ends: the next column to be written is the same for all, so that writing it is one update in
place. A slot that started later starts at a later column; what lies before is hidden. When the columns run out, they
are moved to the left over columns that no running slot needs, or made more, so that their number follows the longest
running completion.
"""

from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from groupax.models.config import ModelConfig
from groupax.parallel.mesh import DATA, RULES
from groupax.parallel.pytree import pytree

ROWS = PartitionSpec(DATA)
HEADS = PartitionSpec(DATA, RULES["kv_heads"])


@pytree
class Cache:
    """What B slots and their Q prompts have fed; B / Q slots share a prompt. Keys lie with their columns last.

    Attributes:
        prompt_tokens: right-aligned.
        prompt_starts: the first column of each prompt.
        prompt_k, prompt_v: their keys and values, per layer.
        tokens: of the slots.
        k, v: their keys and values, per layer.
    """

    prompt_tokens: Int[Array, "Q S"]
    prompt_starts: Int[Array, "Q"]
    prompt_k: list[Float[Array, "Q K H S"]]
    prompt_v: list[Float[Array, "Q K S H"]]
    tokens: Int[Array, "B T"]
    k: list[Float[Array, "B K H T"]]
    v: list[Float[Array, "B K T H"]]

    @property
    def num_columns(self) -> int:
        """T: how many tokens a slot can hold behind its prompt."""
        return self.tokens.shape[1]

    @property
    def num_prompt_columns(self) -> int:
        """S: how many tokens a prompt can have."""
        return self.prompt_tokens.shape[1]


def pspec_of(x: Any) -> PartitionSpec:
    """Where an array of a cache lies: rows on their devices, of keys and values the heads too."""
    return HEADS if x.ndim == 4 else ROWS


def cache_dtype(asked: Any, weights: str, dtype: Any, platform: str) -> Any:
    """That of keys and values.

    Args:
        asked: None for that of the weights that are decoded with, on CPU float32: to write one column of an array of
            fewer bits, XLA's CPU backend goes through all of it.
        weights: in which form these are (see `Engine`).
        dtype: of those that they are made of.
        platform: of the devices.
    """
    if asked is None and platform == "cpu":
        return jnp.dtype(jnp.float32)
    return jnp.dtype(asked or ("bfloat16" if weights == "bfloat16" else dtype))


def token_bytes(config: ModelConfig, dtype: Any, tp: int) -> int:
    """Of one token's keys and values in all layers, on one of the tp devices that share them."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize // tp


def empty_cache(
    config: ModelConfig, num_prompts: int, num_prompt_columns: int, num_slots: int, num_columns: int, dtype: Any
) -> Cache:
    """A cache of zeros."""
    K, H, layers = config.num_kv_heads, config.head_dim, range(config.num_layers)
    return Cache(
        prompt_tokens=jnp.zeros((num_prompts, num_prompt_columns), jnp.int32),
        prompt_starts=jnp.full(num_prompts, num_prompt_columns, jnp.int32),
        prompt_k=[jnp.zeros((num_prompts, K, H, num_prompt_columns), dtype) for _ in layers],
        prompt_v=[jnp.zeros((num_prompts, K, num_prompt_columns, H), dtype) for _ in layers],
        tokens=jnp.zeros((num_slots, num_columns), jnp.int32),
        k=[jnp.zeros((num_slots, K, H, num_columns), dtype) for _ in layers],
        v=[jnp.zeros((num_slots, K, num_columns, H), dtype) for _ in layers],
    )
