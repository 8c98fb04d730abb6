"""The engine's programs compiled for devices that need not exist: what they take in memory, and that they compile."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from groupax.engine.cache import empty_cache
from groupax.engine.decode import REPLICATED, ROWS, admit, decode_chunk
from groupax.engine.plan import CacheShape, max_prompts
from groupax.engine.slots import BIASED_TOKENS, STOP_IDS, slot_table, slots_of
from groupax.models.config import ModelConfig
from groupax.models.specs import model_specs
from groupax.parallel.mesh import num_data_shards


def lowered_programs(
    config: ModelConfig, mesh: Mesh, shape: CacheShape, dtype: Any = jnp.bfloat16, num_steps: int = 32
) -> dict[str, jax.stages.Lowered]:
    """The programs `admit` and `decode_chunk`, each to be compiled with `.compile()`, which has a `memory_analysis()`.

    Args:
        config: the model.
        mesh: of real devices, or of those of a topology (`jax.experimental.topologies`).
        shape: of each shard's cache.
        dtype: of weights and cache.
        num_steps: of a chunk.
    """
    rows, replicated = NamedSharding(mesh, ROWS), NamedSharding(mesh, REPLICATED)
    num_shards = num_data_shards(mesh)

    def on_rows(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=rows)

    def numbers(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=rows)

    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=replicated), model_specs(config)
    )
    num_slots, num_places = num_shards * shape.num_slots, num_shards * shape.num_places
    sizes = (num_places, shape.num_prompt_columns, num_slots, shape.num_columns)
    cache = jax.tree.map(on_rows, jax.eval_shape(lambda: empty_cache(config, *sizes, dtype)))
    slots = slots_of(slot_table(num_slots, STOP_IDS, BIASED_TOKENS), on_rows)
    num_prompts = num_shards * max(2, min(shape.num_places, max_prompts(shape.num_prompt_columns)))
    prompts = numbers(num_prompts, shape.num_prompt_columns), numbers(num_prompts)
    is_new = on_rows(np.zeros(num_slots, bool))
    static = {"config": config, "mesh": mesh}
    column = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    return {
        "admit": admit.lower(params, cache, slots, *prompts, numbers(num_places), is_new, slots, **static),
        "decode_chunk": decode_chunk.lower(params, cache, slots, column, num_steps=num_steps, **static),
    }
