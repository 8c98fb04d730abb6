"""The cache: keys and values, of prompts apart from what follows them, and states of recurrent layers.

A prompt's columns are stored once in a prompt slot, which the neighbouring slots that continue the prompt read
together. Each slot has further columns of its own, one per token that it has fed, its prompt's last token first; those
after them are masked. A layer with a recurrent state has no columns: each slot has its own state from the beginning,
which starts as that of its prompt.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from groupax.core.settings.sampling import SAMPLER
from groupax.engine.sampling import Options
from groupax.engine.scheduler import CacheShape, Plan
from groupax.engine.sequence import Sequence
from groupax.models.config import ModelConfig
from groupax.models.recurrent import State, empty_state
from groupax.parallel.mesh import DATA, RULES, num_data_shards
from groupax.parallel.pytree import pytree
from groupax.parallel.runtime import cuda_capability

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
    """Returns the limits of a cache."""
    size = token_bytes(config, dtype, tp)
    state_tokens = -(-state_bytes(config) // size)
    layers = len(config.attention_layers), num_recurrent(config)
    return Plan(num_bytes // size, layers[0], max_slots, adapts, state_tokens=state_tokens, num_recurrent=layers[1])


def layer_caches(config: ModelConfig, attention: Iterable[Any], states: Iterable[Any]) -> list[Any]:
    """Returns what each layer keeps, given that of the layers with attention and that of the others."""
    attention, states = iter(attention), iter(states)
    return [next(states if config.is_recurrent(layer) else attention) for layer in range(config.num_layers)]


def by_kind(config: ModelConfig, caches: Many[Any]) -> tuple[list[Any], list[Any]]:
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


_DTYPES = {int: "i4", float: "f4"}


@pytree
class Slots:
    """The state of B slots.

    Attributes:
        token: Token that is fed next.
        position: Position of that token in its sequence; after images with positions in a grid it is not its column.
        length: Number of tokens that the slot has fed, each of which has a column in the cache.
        key: PRNG key of the slot (see `sampling.row_keys`).
        remaining: Number of tokens that the slot may still sample; 0 for an idle slot.
        stop_ids: Tokens that end the sequence, padded with -1.
        settings: Sampling parameters.
        adapter: Index of the adapter, -1 for the base; None for an engine without several adapters.
    """

    token: Int[Array, "B"]
    position: Int[Array, "B"]
    length: Int[Array, "B"]
    key: UInt32[Array, "B 2"]
    remaining: Int[Array, "B"]
    stop_ids: Int[Array, "B E"]
    settings: Options
    adapter: Int[Array, "B"] | None = None


def slot_table(num_slots: int, num_stop_ids: int, num_biased: int, has_adapters: bool = False) -> np.ndarray:
    """Returns idle slots on the host, a structured array with a field per array of `Slots` and of `Options`."""
    columns: list[Any] = [(name, "i4") for name in ("token", "position", "length", "remaining")]
    columns += [("key", "u4", 2), ("stop_ids", "i4", num_stop_ids)]
    of_tokens = [name for name, default in SAMPLER.items() if isinstance(default, Mapping)]
    idle = {name: default for name, default in SAMPLER.items() if name not in of_tokens}
    columns += [(name, _DTYPES[type(default)]) for name, default in idle.items()]
    columns += [(f"{name}_tokens", "i4", num_biased) for name in of_tokens]
    columns += [(name, "f4", num_biased) for name in of_tokens] + [("adapter", "i4")] * has_adapters
    table = np.zeros(num_slots, columns)
    idle |= dict.fromkeys(["stop_ids", *(f"{name}_tokens" for name in of_tokens), *["adapter"] * has_adapters], -1)
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
    for name in SAMPLER:
        value = getattr(sequence.params, name)
        if isinstance(value, Mapping):
            row[f"{name}_tokens"][: len(value)], row[name][: len(value)] = list(value), list(value.values())
        else:
            row[name] = value


def to_slots(table: np.ndarray, put: Callable[[np.ndarray], Any]) -> Slots:
    """Returns the table's columns as `Slots`, each transferred by `put`."""
    columns = {name: put(table[name]) for name in table.dtype.names or ()}
    own = {name: columns.pop(name) for name in columns.keys() & {each.name for each in fields(Slots)}}
    return Slots(**own, settings=columns)


def resize(
    cache: Cache,
    rows: Int[Array, "B"] | None,
    prompt_slots: Int[Array, "Q"] | None,
    *,
    num_columns: int,
    num_prompt_columns: int,
    mesh: Mesh,
) -> Cache:
    """Returns the cache with other slots, prompt slots and numbers of columns; only one array exists twice at a time.

    Args:
        rows: Old index on its device of each new slot, -1 for an idle one; None if neither slots nor columns change.
        prompt_slots: Likewise for the prompt slots; None if neither they nor their columns change.
    """
    columns = {"num_columns": num_columns, "num_prompt_columns": num_prompt_columns}
    arrays, structure = jax.tree.flatten(cache)
    for index, call in enumerate(moves(cache, rows, prompt_slots, **columns, mesh=mesh)):
        if call is not None:
            old, arrays[index] = arrays[index], jax.block_until_ready(call(arrays[index]))
            old.delete()
    return jax.tree.unflatten(structure, arrays)


def moves(
    cache: Cache, rows: Any, prompt_slots: Any, *, num_columns: int, num_prompt_columns: int, mesh: Mesh
) -> list[partial[Array] | None]:
    """Returns the call of `move` that changes each array of the cache as `resize` does, None for none."""
    added, layers = num_prompt_columns - cache.num_prompt_columns, range(len(cache.k))

    def call(rows: Any, axis: int | None, **more: Any) -> partial[Array] | None:
        return None if rows is None else partial(move, rows=rows, axis=axis, **more, mesh=mesh)

    of_slots, of_prompts = {"num_columns": num_columns}, {"num_columns": num_prompt_columns, "at_start": True}
    prompts = [call(prompt_slots, 1, **of_prompts), call(prompt_slots, None, added=added)]
    prompts += [call(prompt_slots, axis, **of_prompts) for axis in (3, 2) for _ in layers]
    slots = [call(rows, 1, **of_slots), *(call(rows, axis, **of_slots) for axis in (3, 2) for _ in layers)]
    return [*prompts, *slots, *(call(rows, None) for _ in jax.tree.leaves(cache.states))]


@partial(jax.jit, static_argnames=("axis", "num_columns", "at_start", "added", "mesh"))
def move(
    x: Array,
    rows: Int[Array, "B"],
    *,
    axis: int | None,
    num_columns: int = 0,
    at_start: bool = False,
    added: int = 0,
    mesh: Mesh,
) -> Array:
    """Returns these rows of an array, with columns, at `axis`, cut or added at their end, or added at their start.

    Without an axis `added` is added to the numbers.
    """

    def local(x: Array, rows: Array) -> Array:
        if axis is None:
            return x[rows] + added if added else x[rows]
        kept = lax.slice_in_dim(x, 0, min(num_columns, x.shape[axis]), axis=axis)[rows]
        padding = num_columns - kept.shape[axis]
        at_axis = (padding, 0) if at_start else (0, padding)
        return jnp.pad(kept, [at_axis if dim == axis else (0, 0) for dim in range(x.ndim)])

    in_specs = (pspec_of(x), ROWS)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=pspec_of(x), check_vma=False)(x, rows)


@partial(jax.jit, static_argnames="mesh")
def move_slots(slots: Slots, rows: Int[Array, "B"], *, mesh: Mesh) -> Slots:
    """Returns these rows of the slots, idle where a row is -1."""

    def local(slots: Slots, rows: Array) -> Slots:
        taken: Slots = jax.tree.map(lambda x: x[rows], slots)
        return replace(taken, remaining=jnp.where(rows < 0, 0, taken.remaining))

    return jax.shard_map(local, mesh=mesh, in_specs=(ROWS, ROWS), out_specs=ROWS, check_vma=False)(slots, rows)


@partial(jax.jit, static_argnames=("num_stop_ids", "num_biased"))
def widen_slots(slots: Slots, *, num_stop_ids: int, num_biased: int) -> Slots:
    """Returns the slots with room for more stop ids and biased tokens."""

    def wide(x: Array, num: int, padding: int) -> Array:
        return jnp.pad(x, ((0, 0), (0, num - x.shape[1])), constant_values=padding)

    of_tokens = {name: x for name, x in slots.settings.items() if x.ndim > 1}
    widened = {name: wide(x, num_biased, -1 if name.endswith("_tokens") else 0) for name, x in of_tokens.items()}
    return replace(slots, stop_ids=wide(slots.stop_ids, num_stop_ids, -1), settings={**slots.settings, **widened})


@partial(jax.jit, static_argnames="mesh")
def read_slots(cache: Cache, rows: Int[Array, "D"], prompt_slots: Int[Array, "D"], *, mesh: Mesh) -> dict[str, Any]:
    """Returns the keys and values of a slot of each shard, and of their prompts, per layer."""
    given = {"k": (cache.k, rows), "v": (cache.v, rows)}
    given |= {"prompt_k": (cache.prompt_k, prompt_slots), "prompt_v": (cache.prompt_v, prompt_slots)}

    def local(given: dict[str, tuple[list[Array], Array]]) -> dict[str, list[Array]]:
        return {name: [x[rows] for x in layers] for name, (layers, rows) in given.items()}

    in_specs = jax.tree.map(pspec_of, given)
    out_specs = {name: [pspec_of(x) for x in layers] for name, (layers, _) in given.items()}
    return jax.shard_map(local, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)(given)


@partial(jax.jit, donate_argnames=("slots",))
def release(slots: Slots, released: Bool[Array, "B"]) -> Slots:
    """Returns the slots, of which the released ones are idle."""
    return replace(slots, remaining=jnp.where(released, 0, slots.remaining))
