"""The cache: keys and values, of prompts apart from what follows them, and states of recurrent layers.

A prompt's columns are stored once in a prompt slot, which the neighbouring slots that continue the prompt read
together. Each slot has further columns of its own, one per token that it has fed, its prompt's last token first; those
after them are masked. A layer with a recurrent state has no columns: each slot has its own state from the beginning,
which starts as that of its prompt.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from groupax.engine.plan import CacheShape, Plan
from groupax.models.config import ModelConfig
from groupax.models.recurrent import State, empty_state
from groupax.parallel.mesh import DATA, RULES, num_data_shards
from groupax.parallel.platform import cuda_capability
from groupax.parallel.pytree import pytree

ROWS = PartitionSpec(DATA)
REPLICATED = PartitionSpec()
HEADS = PartitionSpec(DATA, RULES["kv_heads"])
FLOAT8_CAPABILITY = (8, 9)  # the first compute capability of NVIDIA GPUs that convert float8


@pytree
class Cache:
    """The tokens that B slots and their Q prompts have fed, and what the layers keep of them; B / Q share a prompt.

    Attributes:
        prompt_tokens: Prompts, right-aligned.
        prompt_starts: First column of each prompt.
        prompt_k, prompt_v: Keys and values of the prompts, per layer with attention.
        tokens: Tokens of the slots.
        k, v: Keys and values of the slots, per layer with attention.
        states: States of the slots, per recurrent layer.
    """

    prompt_tokens: Int[Array, "Q S"]
    prompt_starts: Int[Array, "Q"]
    prompt_k: list[Float[Array, "Q K H S"]]
    prompt_v: list[Float[Array, "Q K S H"]]
    tokens: Int[Array, "B T"]
    k: list[Float[Array, "B K H T"]]
    v: list[Float[Array, "B K T H"]]
    states: list[State]

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


def num_cached_heads(config: ModelConfig, tp: int) -> int:
    """Returns the number of heads of keys and values in a cache: one for each of the devices that share latent vectors.

    Each device attends from its own heads to all latent vectors, and so has a copy of them.
    """
    return config.num_kv_heads if config.latent is None else tp


def token_bytes(config: ModelConfig, dtype: Any, tp: int) -> int:
    """Returns the size of one token's keys and values in all layers, on one of the `tp` devices that share them."""
    num_layers = len(config.attention_layers)
    return 2 * num_layers * num_cached_heads(config, tp) * config.head_dim * jnp.dtype(dtype).itemsize // tp


def state_bytes(config: ModelConfig) -> int:
    """Returns the size of a sequence's states in all layers, which each device has of its own slots."""
    if config.recurrent is None:
        return 0
    state = jax.eval_shape(lambda: empty_state(config, 1))
    return num_recurrent(config) * sum(x.size * x.dtype.itemsize for x in state)


def num_recurrent(config: ModelConfig) -> int:
    """Returns the number of recurrent layers."""
    return config.num_layers - len(config.attention_layers)


def plan_for(config: ModelConfig, num_bytes: int, dtype: Any, tp: int, max_slots: int, adapts: bool = False) -> Plan:
    """Returns the limits of a cache.

    Args:
        config: Architecture of the model.
        num_bytes: Size of the cache on a device, with temporary copies.
        dtype: Dtype of keys and values.
        tp: Number of devices that share the heads.
        max_slots: Maximum number of completions decoded at once.
        adapts: Whether the numbers of slots and columns follow the running sequences (see `Plan`).
    """
    size = token_bytes(config, dtype, tp)
    state_tokens = -(-state_bytes(config) // size)
    layers = len(config.attention_layers), num_recurrent(config)
    return Plan(num_bytes // size, layers[0], max_slots, adapts, state_tokens=state_tokens, num_recurrent=layers[1])


def layer_caches(config: ModelConfig, attention: Iterable[Any], states: Iterable[Any]) -> list[Any]:
    """Returns what each layer keeps, given that of the layers with attention and that of the others."""
    attention, states = iter(attention), iter(states)
    return [next(states if config.is_recurrent(layer) else attention) for layer in range(config.num_layers)]


def by_kind(config: ModelConfig, caches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns what the layers with attention keep, and what the others do."""
    kinds = [config.is_recurrent(layer) for layer in range(config.num_layers)]
    pairs = list(zip(kinds, caches, strict=True))
    return [each for recurs, each in pairs if not recurs], [each for recurs, each in pairs if recurs]


def empty_cache(config: ModelConfig, mesh: Mesh, shape: CacheShape, dtype: Any) -> Cache:
    """Returns a cache of zeros whose shards have this shape."""
    K, H, layers = num_cached_heads(config, mesh.shape["tp"]), config.head_dim, config.attention_layers
    num_shards = num_data_shards(mesh)
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
        states=[empty_state(config, num_slots) for _ in range(num_recurrent(config))],
    )


def abstract_cache(config: ModelConfig, mesh: Mesh, shape: CacheShape, dtype: Any) -> Cache:
    """Returns the shapes, dtypes and shardings of a cache, as a `Cache` of `jax.ShapeDtypeStruct`s."""
    shapes = jax.eval_shape(lambda: empty_cache(config, mesh, shape, dtype))
    return jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, pspec_of(x))), shapes)


@lru_cache(maxsize=64)
def cache_maker(config: ModelConfig, mesh: Mesh, shape: CacheShape, dtype: Any) -> Callable[[], Cache]:
    """Returns a jitted function that creates an empty cache on the devices."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_cache(config, mesh, shape, dtype))
    return jax.jit(lambda: empty_cache(config, mesh, shape, dtype), out_shardings=shardings)
