"""The trainer's and the engine's programs of a run, for abstract arrays.

All prompts and completions are assumed to have their maximum length.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from groupax.core.config import GRPOConfig
from groupax.core.schedule import UpdateSchedule, update_schedule
from groupax.core.settings.compute import Checkpointing
from groupax.core.settings.sampling import SamplingParams, sampling_kind
from groupax.core.types import Row
from groupax.data.prompts import prompt_limit
from groupax.engine.core import cache_dtype, plan_for
from groupax.engine.plan import CHUNK_STEPS, FREE_FRAC, CacheShape, Demand, admission_prompts, piece_size
from groupax.engine.programs import Tracer
from groupax.models.adapted import apply_adapter
from groupax.models.config import ModelConfig
from groupax.models.execution import ACCELERATOR_LOGITS, Execution
from groupax.models.flops import activation_bytes_per_token
from groupax.models.lora import LoRAConfig
from groupax.models.params import partition_specs
from groupax.models.weights.casts import bfloat16_params
from groupax.objective.aggregation import Denominators
from groupax.parallel.mesh import decoding_mesh, num_data_shards
from groupax.satellites.planning.abstract import (
    AbstractModel,
    DoesNotFitError,
    Program,
    device_bytes,
    host_bytes,
    sharded_structs,
    struct_with,
)
from groupax.satellites.planning.counting import bytes_between_hosts
from groupax.training.accumulator import ROWS, accumulator_pspecs, all_reduce, zero_grads
from groupax.training.memory import compute_dtype
from groupax.training.packing import attention_cost_with, pack
from groupax.training.step import StepSettings, apply_update, micro_step, score

ACTIVATIONS, LOGITS = "activations", "logits"  # kinds of temporary memory
_LENGTH = "max_completion_length"
_UNLIMITED = 1e15  # bytes
# Settings for which only one value is supported by plans.
_PLANNED: dict[str, Any] = {"max_staleness": 0, "rollout_servers": ()}


@dataclass(frozen=True, eq=False)
class Run:
    """The resident arrays and the programs of a run."""

    num_devices: int  # number of devices
    programs: tuple[Program, ...]  # programs of a rollout and the updates on it, in order
    residents: Mapping[str, Any]  # arrays that stay in memory, by kind
    gathered_bytes: float  # bytes that each device receives from others before a rollout
    gathered_between_hosts: float  # each device's share of what its host receives from other hosts for that
    fetched_bytes: float  # bytes that each device receives from its host before a rollout is scored
    cache: CacheShape  # shape of each device's KV cache
    num_micro_batches: int  # number of micro-batches of an optimizer step
    checkpointing: Checkpointing  # what the backward pass recomputes, as set or chosen
    micro_batch_tokens: int  # maximum tokens of a micro-batch on one device, as set or chosen
    micro_batch_cells: int  # tokens of the largest micro-batch on one device, padding included
    longest_row: int  # tokens of a prompt and a completion
    num_rows: int  # number of completions of a rollout
    num_updates: int  # number of optimizer steps on a rollout


def unplanned_setting(args: GRPOConfig) -> str:
    """Returns which setting plans do not support; an empty text if there is none."""
    for name, value in _PLANNED.items():
        if getattr(args, name) != value:
            return f"{name} {getattr(args, name)!r} is not supported by plans; leave it at {value!r}"
    return ""


def trace_run(
    config: ModelConfig,
    mesh: Mesh,
    args: GRPOConfig,
    lora: LoRAConfig | None = None,
    memory_bytes: float | None = None,
    like: "Run | None" = None,
) -> Run:
    """Returns the programs of a run, most of which are traced when they are needed.

    Args:
        config: Config of the model.
        mesh: Mesh of the devices, which may be absent.
        args: Settings of the run.
        lora: Config of the adapter to train; None for all weights.
        memory_bytes: Memory of a device; None for no limit.
        like: A run of the same model with more layers, whose cache and micro-batches have the sizes to use; None for
            those that the engine and the learner would choose.

    Raises:
        DoesNotFitError: A device cannot hold the resident arrays, or the rollout's weights, keys and values.
    """
    if like:
        args = replace(args, gradient_checkpointing=like.checkpointing, micro_batch_tokens=like.micro_batch_tokens)
        args = replace(args, scan_layers=any(program.scans_layers for program in like.programs))
    model_state = AbstractModel(config, mesh, args, lora)
    limit = math.inf if memory_bytes is None else memory_bytes
    left = math.inf if like else limit - device_bytes(model_state.residents)
    if left <= 0:
        taken = device_bytes(model_state.residents) / 1e9
        raise DoesNotFitError(
            f"weights and optimizer alone need {taken:.1f} GB of a device that has {limit / 1e9:.1f} GB",
            in_rollout=False,
        )
    if unplanned := unplanned_setting(args):
        raise ValueError(unplanned)
    schedule = update_schedule(args)
    num_rows = schedule.prompts_per_rollout * args.num_generations
    prompt = prompt_limit(config.max_positions, args.max_completion_length, args.max_prompt_length, _LENGTH)
    longest = (prompt, args.max_completion_length)
    rollout, cache, gathered = trace_rollout(model_state, num_rows, longest, left, like.cache if like else None)
    execution, tokens = model_state.execution(longest, left)
    updates, num_micro_batches, cells = trace_training(model_state, execution, schedule, longest, tokens)
    return Run(
        num_devices=mesh.devices.size,
        programs=(*rollout, *updates),
        residents=model_state.residents,
        gathered_bytes=gathered,
        gathered_between_hosts=bytes_between_hosts(gathered, mesh.devices.flat),
        fetched_bytes=host_bytes({"reference": model_state.residents.get("reference")}),
        cache=cache,
        num_micro_batches=num_micro_batches,
        checkpointing=execution.checkpointing,
        micro_batch_tokens=tokens,
        micro_batch_cells=cells,
        longest_row=sum(longest),
        num_rows=num_rows,
        num_updates=schedule.updates_per_rollout,
    )


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
    """
    config, args = model_state.config, model_state.args
    mesh, copies = decoding_mesh(model_state.mesh, args.decoding_tp), args.decoding_weights != "same"
    given = apply_adapter(model_state.frozen, model_state.policy)
    gathered = sharded_structs(given, partition_specs(config, mesh, given), mesh)
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(gathered), strict=True)
    gathers = not all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
    params = gathered
    if copies:
        params = jax.eval_shape(bfloat16_params, given)
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
    most = admission_prompts(shape, has_prefixes=False)
    piece = piece_size(most, columns, own_heads, model_state.platform)
    num_pieces = -(-min(num_prompts, most) // piece[0]) * (columns // piece[1])
    arguments = {**({"rollout weights": params} if kept else model_state.own), "kv cache": tracer.cache(shape)}
    programs = [
        Program("admit", trace_admit, arguments, -(-num_prompts // most), num_pieces),
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


def trace_training(
    model_state: AbstractModel, execution: Execution, schedule: UpdateSchedule, longest: tuple[int, int], tokens: int
) -> tuple[tuple[Program, ...], int, int]:
    """Returns the learner's programs for micro-batches of at most `tokens` tokens on each device.

    Also returns the number of micro-batches of an optimizer step, and the tokens of the largest one on a device with
    its padding.
    """
    mesh, args = model_state.mesh, model_state.args
    rows = [
        _row(index // args.num_generations, longest, args, schedule.updates_per_rollout)
        for index in range(schedule.rows)
    ]
    attention_cost = attention_cost_with(execution.attention)
    micro_batches, _ = pack(rows, num_data_shards(mesh), tokens, (), args.share_prefix, longest, attention_cost)
    largest = max(micro_batches, key=lambda each: each.num_tokens)
    batch = jax.tree.map(lambda x: struct_with(x, NamedSharding(mesh, ROWS)), largest.batch)
    programs = (
        *_trace_scoring(model_state, execution, batch, len(micro_batches), schedule),
        *_trace_update(model_state, execution, batch, len(micro_batches), schedule.updates_per_rollout),
    )
    return programs, len(micro_batches), largest.num_tokens // num_data_shards(mesh)


def _trace_scoring(
    model_state: AbstractModel, execution: Execution, batch: Any, num_micro_batches: int, schedule: UpdateSchedule
) -> list[Program]:
    """Traces the scoring of a rollout by the reference and the policy, if it needs any."""
    args = model_state.args
    # the policy scores all rows before updates other than the first, and to find the tokens of high entropy
    policy_passes = schedule.minibatches - 1 + schedule.updates_per_rollout * (args.top_entropy_quantile < 1)
    passes = policy_passes + schedule.minibatches * (args.beta > 0)
    if not passes:
        return []
    params = apply_adapter(model_state.frozen, model_state.policy) if policy_passes else model_state.reference
    reference = {"base" if model_state.base_name == "base" else "reference": model_state.reference}
    arguments = model_state.own if policy_passes and not args.offload_reference else reference
    trace = partial(
        score.trace,
        params,
        batch,
        settings=StepSettings(model_state.config, model_state.settings.objective, model_state.mesh, execution),
    )
    return [Program("score", trace, arguments, num_micro_batches * passes, scans_layers=execution.scan_layers)]


def _trace_update(
    model_state: AbstractModel, execution: Execution, batch: Any, num_micro_batches: int, updates: int
) -> list[Program]:
    """Traces the programs of an optimizer step."""
    config, mesh, scalar = model_state.config, model_state.mesh, model_state.scalar
    static: dict[str, Any] = {"config": config, "mesh": mesh}
    objective = model_state.settings.objective
    totals = jax.eval_shape(lambda params: zero_grads(params, settings=objective, **static), model_state.policy)
    totals = sharded_structs(totals, accumulator_pspecs(config, mesh, model_state.policy, totals), mesh)
    counts: Any = jax.tree.unflatten(jax.tree.structure(Denominators(jnp.zeros(()), jnp.zeros(()))), [scalar, scalar])
    key = struct_with(jax.eval_shape(lambda: jax.random.key(0)), NamedSharding(mesh, PartitionSpec()))
    dropout_key = key if model_state.dropout_rate else None
    trace_step = partial(
        micro_step.trace,
        *(model_state.policy, totals, batch, counts, scalar, model_state.frozen, dropout_key),
        settings=StepSettings(config, objective, mesh, execution, model_state.dropout_rate),
    )
    sums = all_reduce.trace(totals, **static)
    grads = jax.eval_shape(lambda totals: totals.grads, sums.out_info)
    grads = sharded_structs(grads, partition_specs(config, mesh, model_state.masters), mesh)
    offload = model_state.args.offload_optimizer
    trace_update = partial(
        apply_update.trace,
        *(model_state.state, grads, scalar),
        **static,
        optimizer=model_state.optimizer,
        offload_optimizer=offload,
    )
    state = {"masters": model_state.state.params, "optimizer": model_state.state.opt_state}
    moved_bytes = 2 * host_bytes(state)  # each array comes and goes
    arguments = {**model_state.own, "gradients": totals}
    scans = execution.scan_layers
    return [
        Program("micro_step", trace_step, arguments, num_micro_batches * updates, scans_layers=scans),
        Program("all_reduce", lambda: sums, {"gradients": totals}, updates),
        Program("apply_update", trace_update, {**state, "gradients": grads}, updates, transferred_bytes=moved_bytes),
    ]


def _row(group: int, longest: tuple[int, int], args: GRPOConfig, updates: int) -> Row:
    """Returns a completion of maximum length with the fields that its update needs."""
    prompt, completion = (np.zeros(length, np.int32) for length in longest)
    logp = np.zeros(longest[1], np.float32)
    return Row(
        group,
        prompt,
        completion,
        np.ones(longest[1], bool),
        logp,
        logp,
        old_logp=logp if updates > 1 else None,
        ref_logp=logp if args.has_kl_loss else None,
        sampler_logp=logp if args.rollout_correction != "none" else None,
        policy_mask=np.ones(longest[1], bool) if args.top_entropy_quantile < 1 else None,
    )


def estimated_temporaries(
    config: ModelConfig, mesh: Mesh, args: GRPOConfig, run: Run
) -> dict[str, Mapping[str, float]]:
    """Returns bytes of activations and of logits on a device while each program runs.

    Copies that the compiler makes, of weights for instance, are not included.

    Args:
        config: Config of the model.
        mesh: Mesh of the devices.
        args: Settings of the run.
        run: The run.
    """
    itemsize = compute_dtype(mesh.devices.flat[0].platform, args.dtype).itemsize
    decoding, cache = decoding_mesh(mesh, args.decoding_tp), run.cache
    vocab_bytes = 4 * config.vocab_size / decoding.shape["tp"]  # of a row's logits, in float32
    prompts, columns = admission_prompts(cache, has_prefixes=False), cache.num_prompt_columns
    platform = mesh.devices.flat[0].platform
    piece = math.prod(piece_size(prompts, columns, config.num_heads // decoding.shape["tp"], platform))
    cells = run.micro_batch_cells / mesh.shape["sp"]
    chunk = 4 * min(ACCELERATOR_LOGITS, cells * config.vocab_size / mesh.shape["tp"])

    def activations(checkpointing: str) -> float:
        return activation_bytes_per_token(config, itemsize, checkpointing) / mesh.shape["tp"]

    [kv] = [device_bytes({"": each.arguments["kv cache"]}) for each in run.programs if each.name == "decode_chunk"]
    admitted = kv * prompts * columns / cache.num_tokens  # keys and values before they are in the cache
    return {
        "admit": {ACTIVATIONS: admitted + activations("full") * piece, LOGITS: 0.0},
        "decode_chunk": {ACTIVATIONS: activations("full") * cache.num_slots, LOGITS: 2 * vocab_bytes * cache.num_slots},
        "score": {ACTIVATIONS: activations("full") * cells, LOGITS: chunk},
        "micro_step": {ACTIVATIONS: activations(run.checkpointing) * cells, LOGITS: 2 * chunk},
    }
