"""The key-value cache: prompts apart from what follows them.

A prompt's columns are stored once in a prompt slot, which the neighbouring slots that continue the prompt read
together. Each slot has further columns of its own, one per token that it has fed, its prompt's last token first; those
after them are masked.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from groupax.engine.plan import CacheShape
from groupax.models.config import ModelConfig
from groupax.parallel.mesh import DATA, RULES, num_data_shards
from groupax.parallel.platform import cuda_capability
from groupax.parallel.pytree import pytree

ROWS = PartitionSpec(DATA)
REPLICATED = PartitionSpec()
HEADS = PartitionSpec(DATA, RULES["kv_heads"])
FLOAT8_CAPABILITY = (8, 9)  # the first compute capability of NVIDIA GPUs that convert float8


@pytree
class Cache:
    """The tokens that B slots and their Q prompts have fed, and their keys and values; B / Q slots share a prompt.

    Attributes:
        prompt_tokens: Prompts, right-aligned.
        prompt_starts: First column of each prompt.
        prompt_k, prompt_v: Keys and values of the prompts, per layer.
        tokens: Tokens of the slots.
        k, v: Keys and values of the slots, per layer.
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
        """Number of tokens that a slot can hold after its prompt, T."""
        return self.tokens.shape[1]

    @property
    def num_prompt_columns(self) -> int:
        """Number of tokens that a prompt can have, S."""
        return self.prompt_tokens.shape[1]


def pspec_of(x: Any) -> PartitionSpec:
    """Returns the pspec of an array of a cache: rows over the data axes, heads of keys and values over `tp`."""
    return HEADS if x.ndim == 4 else ROWS


def cache_dtype(requested: Any, weights: str, dtype: Any, device: Any) -> Any:
    """Returns the dtype of keys and values.

    Args:
        requested: A dtype, or "float8" for float8_e4m3fn; None for the dtype of the decoding weights, on CPU float32:
            to write one column of an array of fewer bits, XLA's CPU backend goes through all of it.
        weights: Format of the decoding weights (see `Engine`).
        dtype: Dtype of the weights that they are created from.
        device: One of the devices.

    Raises:
        ValueError: The dtype has no fractions, or the device cannot convert it.
    """
    if requested is None and device.platform == "cpu":
        return jnp.dtype(jnp.float32)
    requested = jnp.float8_e4m3fn if requested == "float8" else requested
    chosen = jnp.dtype(requested or ("bfloat16" if weights == "bfloat16" else dtype))
    if not jnp.issubdtype(chosen, jnp.floating):
        raise ValueError(f"keys and values are fractions, but kv_dtype is {chosen}; use 'float8' for 8 bits")
    capability = cuda_capability(device)
    if chosen.itemsize == 1 and capability is not None and capability < FLOAT8_CAPABILITY:
        raise ValueError(
            f"keys and values in {chosen} need compute capability 8.9, and {device.device_kind} has "
            f"{capability[0]}.{capability[1]}; use kv_dtype 'bfloat16'"
        )
    return chosen


def token_bytes(config: ModelConfig, dtype: Any, tp: int) -> int:
    """Returns the size of one token's keys and values in all layers, on one of the `tp` devices that share them."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize // tp


def empty_cache(config: ModelConfig, num_shards: int, shape: CacheShape, dtype: Any) -> Cache:
    """Returns a cache of zeros whose shards have this shape."""
    K, H, layers = config.num_kv_heads, config.head_dim, range(config.num_layers)
    num_prompts, num_slots = num_shards * shape.num_prompt_slots, num_shards * shape.num_slots
    num_prompt_columns, num_columns = shape.num_prompt_columns, shape.num_columns
    return Cache(
        prompt_tokens=jnp.zeros((num_prompts, num_prompt_columns), jnp.int32),
        prompt_starts=jnp.full(num_prompts, num_prompt_columns, jnp.int32),
        prompt_k=[jnp.zeros((num_prompts, K, H, num_prompt_columns), dtype) for _ in layers],
        prompt_v=[jnp.zeros((num_prompts, K, num_prompt_columns, H), dtype) for _ in layers],
        tokens=jnp.zeros((num_slots, num_columns), jnp.int32),
        k=[jnp.zeros((num_slots, K, H, num_columns), dtype) for _ in layers],
        v=[jnp.zeros((num_slots, K, num_columns, H), dtype) for _ in layers],
    )


def abstract_cache(config: ModelConfig, mesh: Mesh, shape: CacheShape, dtype: Any) -> Cache:
    """Returns the shapes, dtypes and shardings of a cache, as a `Cache` of `jax.ShapeDtypeStruct`s."""
    shapes = jax.eval_shape(lambda: empty_cache(config, num_data_shards(mesh), shape, dtype))
    return jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, pspec_of(x))), shapes)


@lru_cache(maxsize=64)
def cache_maker(config: ModelConfig, mesh: Mesh, shape: CacheShape, dtype: Any) -> Callable[[], Cache]:
    """Returns a jitted function that creates an empty cache on the devices."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_cache(config, mesh, shape, dtype))
    return jax.jit(lambda: empty_cache(config, num_data_shards(mesh), shape, dtype), out_shardings=shardings)
