"""The cache: keys and values, of prompts apart from what follows them, and states of recurrent layers.

A prompt's columns are stored once in a prompt slot, which the neighbouring slots that continue the prompt read
together. Each slot has further columns of its own, one per token that it has fed, its prompt's last token first; those
after them are masked. A layer with a recurrent state has no columns: each slot has its own state from the beginning,
which starts as that of its prompt.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, UInt32

from groupax.core.settings.sampling import BIASED_TOKENS, SAMPLER, STOP_IDS
from groupax.engine.plan import CacheShape
from groupax.engine.rules import Options
from groupax.engine.sequence import Sequence
from groupax.models.attention import LayerCache
from groupax.models.config import ModelConfig
from groupax.models.recurrent import State, empty_state
from groupax.parallel.mesh import DATA, RULES, num_data_shards
from groupax.parallel.pytree import pytree

ROWS = PartitionSpec(DATA)
REPLICATED = PartitionSpec()
HEADS = PartitionSpec(DATA, RULES["kv_heads"])


@pytree
class Cache:
    """The tokens that B slots and their Q prompts have fed, and what the layers keep of them; B / Q share a prompt.

    Attributes:
        prompt_tokens: Prompts, right-aligned.
        prompt_starts: First column of each prompt.
        tokens: Tokens of the slots.
        layers: Keys and values of each layer with attention, and the slots' states in each recurrent one.
    """

    prompt_tokens: Int[Array, "Q S"]
    prompt_starts: Int[Array, "Q"]
    tokens: Int[Array, "B T"]
    layers: list[LayerCache | State]

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


def num_cached_heads(config: ModelConfig, tp: int) -> int:
    """Returns the number of heads of keys and values in a cache: one for each of the devices that share latent vectors.

    Each device attends from its own heads to all latent vectors, and so has a copy of them.
    """
    return config.num_kv_heads if config.latent is None else tp


def empty_columns(B: int, K: int, H: int, T: int, dtype: Any) -> tuple[Array, Array]:
    """Returns the keys and the values of B rows with T columns, all zero."""
    return jnp.zeros((B, K, H, T), dtype), jnp.zeros((B, K, T, H), dtype)


def empty_cache(config: ModelConfig, mesh: Mesh, shape: CacheShape, dtype: Any) -> Cache:
    """Returns a cache of zeros whose shards have this shape."""
    heads = num_cached_heads(config, mesh.shape["tp"]), config.head_dim
    num_shards = num_data_shards(mesh)
    num_prompts, num_slots = num_shards * shape.num_prompt_slots, num_shards * shape.num_slots
    num_prompt_columns, num_columns = shape.num_prompt_columns, shape.num_columns

    def layer(index: int) -> LayerCache | State:
        if config.is_recurrent(index):
            return empty_state(config, num_slots)
        prompts = empty_columns(num_prompts, *heads, num_prompt_columns, dtype)
        return LayerCache(*prompts, *empty_columns(num_slots, *heads, num_columns, dtype))

    return Cache(
        prompt_tokens=jnp.zeros((num_prompts, num_prompt_columns), jnp.int32),
        prompt_starts=jnp.full(num_prompts, num_prompt_columns, jnp.int32),
        tokens=jnp.zeros((num_slots, num_columns), jnp.int32),
        layers=[layer(index) for index in range(config.num_layers)],
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


_DTYPES = {int: "i4", float: "f4"}


@pytree
class Slots:
    """The state of B slots."""

    token: Int[Array, "B"]  # token that is fed next
    # position of that token in its sequence; after images with positions in a grid it is not its column
    position: Int[Array, "B"]
    length: Int[Array, "B"]  # number of tokens that the slot has fed, each of which has a column in the cache
    key: UInt32[Array, "B 2"]  # PRNG key of the slot (see `sampling.row_keys`)
    remaining: Int[Array, "B"]  # number of tokens that the slot may still sample; 0 for an idle slot
    stop_ids: Int[Array, "B E"]  # tokens that end the sequence, padded with -1
    settings: Options  # sampling parameters
    # index of the adapter, -1 for the base; None for an engine without several adapters
    adapter: Int[Array, "B"] | None = None


def slot_table(num_slots: int, has_adapters: bool = False) -> np.ndarray:
    """Returns idle slots on the host, a structured array with a field per array of `Slots` and of `Options`."""
    columns: list[Any] = [(name, "i4") for name in ("token", "position", "length", "remaining")]
    columns += [("key", "u4", 2), ("stop_ids", "i4", STOP_IDS)]
    idle = {name: default for name, default in SAMPLER.items() if name != "logit_bias"}
    columns += [(name, _DTYPES[type(default)]) for name, default in idle.items()]
    columns += [("logit_bias_tokens", "i4", BIASED_TOKENS), ("logit_bias", "f4", BIASED_TOKENS)]
    columns += [("adapter", "i4")] * has_adapters
    table = np.zeros(num_slots, columns)
    idle |= dict.fromkeys(["stop_ids", "logit_bias_tokens", *["adapter"] * has_adapters], -1)
    for name, value in idle.items():
        table[name] = value
    return table


def fill(row: np.void, sequence: Sequence) -> None:
    """Enters a sequence that starts."""
    row["token"] = sequence.prompt[-1]
    row["position"] = len(sequence.prompt) - 1 + (sequence.images.position_offset if sequence.images else 0)
    row["length"] = 0
    row["key"] = sequence.key
    row["remaining"] = sequence.params.max_tokens
    row["stop_ids"][: len(sequence.stop_ids)] = sequence.stop_ids
    for name in SAMPLER.keys() - {"logit_bias"}:
        row[name] = getattr(sequence.params, name)
    biases = sequence.params.logit_bias
    row["logit_bias_tokens"][: len(biases)], row["logit_bias"][: len(biases)] = list(biases), list(biases.values())


def to_slots(table: np.ndarray, put: Callable[[np.ndarray], Any]) -> Slots:
    """Returns the table's columns as `Slots`, each transferred by `put`."""
    columns = {name: put(table[name]) for name in table.dtype.names or ()}
    own = {name: columns.pop(name) for name in columns.keys() & {each.name for each in fields(Slots)}}
    return Slots(**own, settings=columns)


@partial(jax.jit, donate_argnames=("slots",))
def release(slots: Slots, released: Bool[Array, "B"]) -> Slots:
    """Returns the slots, of which the released ones are idle."""
    return replace(slots, remaining=jnp.where(released, 0, slots.remaining))
