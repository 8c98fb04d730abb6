"""The engine's programs for a rollout, with the shapes that it would choose."""

from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from groupax.engine.cache import cache_dtype, plan_for
from groupax.engine.programs import Tracer
from groupax.engine.scheduler import CHUNK_STEPS, FREE_FRAC, CacheShape, Demand, piece_size
from groupax.models.adapted import apply_adapter
from groupax.models.params import partition_specs
from groupax.models.weights.quantize import decoding_params
from groupax.parallel.mesh import decoding_mesh, num_data_shards
from groupax.planning.abstract import AbstractModel, sharded_structs
from groupax.planning.programs import DoesNotFitError, Program, device_bytes
from groupax.settings.sampling import SamplingParams, sampling_kind

_UNLIMITED = 1e15  # bytes


def trace_rollout(
    model_state: AbstractModel,
    num_rows: int,
    longest: tuple[int, int],
    left: float,
    shape: CacheShape | None = None,
) -> tuple[list[Program], CacheShape, float]:
    """Returns the engine's programs, its cache's shape, and the bytes that a device receives before decoding.

    Args:
        model_state: The model.
        num_rows: Number of completions of a rollout.
        longest: Tokens of the longest prompt and of the longest completion.
        left: Bytes of a device's memory that the resident arrays leave free.
        shape: Shape of the cache; None for the one that the engine would choose.

    Raises:
        DoesNotFitError: The weights for decoding, or the keys and values, do not fit.
    """
    config, args = model_state.config, model_state.args
    mesh, copies = decoding_mesh(model_state.mesh, args.decoding_tp), args.decoding_weights != "same"
    given = apply_adapter(model_state.frozen, model_state.policy)
    gathered = sharded_structs(given, partition_specs(config, mesh, given), mesh)
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(gathered), strict=True)
    gathers = not all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
    params = gathered
    if copies:
        params = jax.eval_shape(lambda params: decoding_params(config, params, args.decoding_weights), given)
        params = sharded_structs(params, partition_specs(config, mesh, params), mesh)
    kept = device_bytes({"weights": params}) if gathers or copies else 0.0
    at_once = kept + (device_bytes({"weights": gathered}) if gathers and copies else 0.0)  # while they are converted
    if at_once > left:
        raise DoesNotFitError(
            f"the weights for decoding rollouts need {at_once / 1e9:.1f} GB of a device, but weights and optimizer "
            f"leave {left / 1e9:.1f} GB",
            in_rollout=True,
        )
    requested_dtype = None if args.kv_cache_dtype == "same" else args.kv_cache_dtype
    kv_dtype = cache_dtype(requested_dtype, args.decoding_weights, model_state.dtype, mesh.devices.flat[0])
    shape = shape or _cache_shape(model_state, mesh, num_rows, longest, kv_dtype, left - kept)
    tracer = Tracer(config, mesh, params, kv_dtype, CHUNK_STEPS)
    per_shard, num_chunks = -(-num_rows // num_data_shards(mesh)), -(-longest[1] // CHUNK_STEPS)
    num_prompts, num_waves = -(-per_shard // shape.share), -(-per_shard // shape.num_slots)
    sampling = sampling_kind([args.part(SamplingParams)])
    trace_admit, trace_decode = partial(tracer.admit, shape), partial(tracer.decode_chunk, shape, sampling)
    own_heads, columns = config.num_heads // mesh.shape["tp"], shape.num_prompt_columns
    piece = piece_size(shape.max_prompts, columns, own_heads, model_state.platform)
    num_pieces = -(-min(num_prompts, shape.max_prompts) // piece[0]) * (columns // piece[1])
    arguments = {**({"rollout weights": params} if kept else model_state.own), "kv cache": tracer.cache(shape)}
    programs = [
        Program("admit", trace_admit, arguments, -(-num_prompts // shape.max_prompts), num_pieces),
        Program("decode_chunk", trace_decode, arguments, num_waves * num_chunks, CHUNK_STEPS),
    ]
    return programs, shape, device_bytes({"weights": gathered}) - device_bytes({"weights": given}) if gathers else 0.0


def _cache_shape(
    model_state: AbstractModel, mesh: Mesh, num_rows: int, longest: tuple[int, int], kv_dtype: Any, free: float
) -> CacheShape:
    """Returns the largest shape of a data shard's cache that the engine would choose with this much free memory."""
    config, args, num_shards = model_state.config, model_state.args, num_data_shards(mesh)
    demand = Demand((args.num_generations,) * (num_rows // args.num_generations), longest[0] - 1, longest[1])
    budget = FREE_FRAC * free if args.kv_cache_gb is None else args.kv_cache_gb * 1e9
    num_bytes = int(min(budget, _UNLIMITED))
    allowed = plan_for(config, num_bytes, kv_dtype, mesh.shape["tp"], args.max_concurrent_rows)
    try:
        shape = allowed.first_shape(demand, num_shards)
    except ValueError as error:
        text = f"{free / 1e9:.1f} GB of a device are left for a rollout's keys and values: {error}"
        raise DoesNotFitError(text, in_rollout=True) from error
    columns = allowed.smallest_shape(demand).num_columns
    return allowed.smaller(CacheShape(shape.num_slots, shape.share, shape.num_prompt_columns, columns))
