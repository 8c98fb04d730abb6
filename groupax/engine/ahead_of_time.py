"""The engine's programs for devices that need not exist: traced, to be compiled and counted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from groupax.engine.cache import ROWS, empty_cache, pspec_of
from groupax.engine.decode import REPLICATED, admit, decode_chunk
from groupax.engine.plan import CacheShape, max_prompts
from groupax.engine.slots import slot_table, to_slots
from groupax.models.config import ModelConfig
from groupax.models.specs import Params
from groupax.models.split import partition_specs
from groupax.parallel.mesh import num_data_shards
from groupax.settings.sampling import BIASED_TOKENS, STOP_IDS

CHUNK_STEPS = 32


def traced_programs(
    config: ModelConfig, mesh: Mesh, shape: CacheShape, params: Params, kv_dtype: Any
) -> tuple[jax.stages.Traced, jax.stages.Traced, Any, Any]:
    """The programs `admit`, of as many prompts as are computed at once, and `decode_chunk`; their weights and cache.

    Args:
        config: the model.
        mesh: of real devices, or of those of a topology (`jax.experimental.topologies`).
        shape: of each shard's cache.
        params: shapes and dtypes of the weights to decode with.
        kv_dtype: of keys and values.
    """
    rows, replicated = NamedSharding(mesh, ROWS), NamedSharding(mesh, REPLICATED)
    num_shards = num_data_shards(mesh)

    def on_rows(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=rows)

    def numbers(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=rows)

    def as_in(x: Any, place: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, place))

    params = jax.tree.map(as_in, params, partition_specs(config, mesh, params))
    num_slots, num_prompt_slots = num_shards * shape.num_slots, num_shards * shape.num_prompt_slots
    sizes = (num_prompt_slots, shape.num_prompt_columns, num_slots, shape.num_columns)
    cache = jax.tree.map(lambda x: as_in(x, pspec_of(x)), jax.eval_shape(lambda: empty_cache(config, *sizes, kv_dtype)))
    table = slot_table(num_slots, STOP_IDS, BIASED_TOKENS)
    slots = jax.tree.map(on_rows, jax.eval_shape(lambda: to_slots(table, jnp.asarray)))
    num_prompts = num_shards * prompts_at_once(shape)
    prompts = numbers(num_prompts, shape.num_prompt_columns), numbers(num_prompts)
    is_new = on_rows(np.zeros(num_slots, bool))
    static = {"config": config, "mesh": mesh}
    column = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    admits = admit.trace(params, cache, slots, *prompts, numbers(num_prompt_slots), is_new, slots, **static)
    return admits, decode_chunk.trace(params, cache, slots, column, num_steps=CHUNK_STEPS, **static), params, cache


def prompts_at_once(shape: CacheShape) -> int:
    """Prompts that are computed in one admission on each shard, if as many wait."""
    return min(shape.num_prompt_slots, max_prompts(shape.num_prompt_columns))
