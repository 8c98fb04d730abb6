"""The programs of a run, as the trainer and the engine have them, with shapes in the place of arrays.

Prompts and completions are taken to be as long as they may become, all of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from groupax.batch import Row, pack
from groupax.config import GRPOConfig
from groupax.data import prompt_limit
from groupax.engine.ahead_of_time import CHUNK_STEPS, prompts_at_once, traced_programs
from groupax.engine.cache import cache_dtype, token_bytes
from groupax.engine.plan import CACHE_COLUMNS, FREE_PART, CacheShape, Plan, bucket, longest_columns, piece_columns
from groupax.learner import CPU_MICRO_BATCH_TOKENS, compute_dtype, fitting_tokens
from groupax.models.adapted import Frozen, joined
from groupax.models.config import ModelConfig
from groupax.models.execution import execution_on
from groupax.models.lora import LoRAConfig, adapter_specs
from groupax.models.quantize import decoding_params
from groupax.models.specs import Params, model_specs
from groupax.models.split import partition_specs
from groupax.objective.aggregation import Denominators
from groupax.optimizer import make_optimizer, make_schedule
from groupax.parallel.mesh import decoding_mesh, num_data_shards
from groupax.run_parts import learner_settings
from groupax.slices import Slices, slices_of
from groupax.step import (
    ROWS,
    TrainState,
    across_shards,
    apply_update,
    micro_step,
    score,
    state_specs,
    totals_specs,
    zero_totals,
)

_LENGTH = "max_completion_length"
_UNLIMITED = 1e15  # bytes
# Optimizer steps of the schedule, which changes nothing of its program.
_STEPS = 1000


class UnfitError(Exception):
    """A run that no device has memory for, whatever its programs take.

    Attributes:
        in_rollout: it is the rollout's weights, keys and values that do not fit; else what is always there.
    """

    def __init__(self, message: str, in_rollout: bool) -> None:
        super().__init__(message)
        self.in_rollout = in_rollout


@dataclass(frozen=True, eq=False)
class Program:
    """A program of a run.

    Attributes:
        name: of the function.
        traced: to be compiled and counted.
        arguments: of it, by what they are; arrays of no kind are left out.
        runs: in a rollout and the updates on it.
        loop_steps: of its loops whose ends depend on what they compute.
    """

    name: str
    traced: jax.stages.Traced
    arguments: Mapping[str, Any]
    runs: int
    loop_steps: int = 1


@dataclass(frozen=True, eq=False)
class Run:
    """What is there while a run goes on, and what it computes.

    Attributes:
        programs: of a rollout and the updates on it, in their order.
        residents: arrays that are always there, by what they are.
        gathered_bytes: that each device gets from others before a rollout.
        cache: shape of each device's keys and values.
        num_micro_batches: of an optimizer step.
        micro_batch_tokens: the most of each on one device, as it was set or found.
        micro_batch_cells: tokens of the largest of them on a device, padding included.
        longest_row: tokens of a prompt and a completion.
        num_rows: completions of a rollout.
        num_updates: optimizer steps on it.
    """

    programs: tuple[Program, ...]
    residents: Mapping[str, Any]
    gathered_bytes: float
    cache: CacheShape
    num_micro_batches: int
    micro_batch_tokens: int
    micro_batch_cells: int
    longest_row: int
    num_rows: int
    num_updates: int


def run_of(
    config: ModelConfig, mesh: Mesh, args: GRPOConfig, lora: LoRAConfig | None = None, memory_bytes: float | None = None
) -> Run:
    """The programs of a run.

    Args:
        config: the model.
        mesh: of the devices, which need not exist.
        args: of the run.
        lora: the adapter that is trained, if one is.
        memory_bytes: of a device; None for no limit.

    Raises:
        ValueError: the settings contradict each other, or ask for what is not planned for.
        UnfitError: a device does not hold what is always there, or the rollout's weights, keys and values.
    """
    of_model = _Abstract(config, mesh, args, lora)
    limit = math.inf if memory_bytes is None else memory_bytes
    left = limit - own_bytes(of_model.residents)
    if left <= 0:
        taken = own_bytes(of_model.residents) / 1e9
        raise UnfitError(
            f"weights and optimizer alone take {taken:.1f} GB of a device that has {limit / 1e9:.1f}", in_rollout=False
        )
    slices = _planned_slices(args)
    num_rows = slices.prompts_per_rollout * args.num_generations
    prompt = prompt_limit(config.max_positions, args.max_completion_length, args.max_prompt_length, _LENGTH)
    longest = (prompt, args.max_completion_length)
    rollout, cache, gathered = _rollout(of_model, num_rows, longest, left)
    tokens = args.micro_batch_tokens or of_model.fitting_tokens(left)
    training = _training(of_model, slices, longest, tokens)
    return Run(
        programs=(*rollout, *training.programs),
        residents=of_model.residents,
        gathered_bytes=gathered,
        cache=cache,
        num_micro_batches=training.num_parts,
        micro_batch_tokens=tokens,
        micro_batch_cells=training.cells,
        longest_row=sum(longest),
        num_rows=num_rows,
        num_updates=slices.steps_per_rollout,
    )


# Settings whose runs are others than those that are planned here, with the value that is.
_PLANNED: dict[str, Any] = {"base_weights": "same", "max_staleness": 0, "rollout": ()}


def _planned_slices(args: GRPOConfig) -> Slices:
    """How rollouts become updates.

    Raises:
        ValueError: something is set that is not planned for.
    """
    for name, value in _PLANNED.items():
        if getattr(args, name) != value:
            raise ValueError(f"{name} {getattr(args, name)!r} is not planned for; leave it at {value!r}")
    slices = slices_of(args)
    if slices.per_step > 1:
        raise ValueError(
            f"updates_per_rollout {args.updates_per_rollout} has updates on parts of several rollouts, which are not "
            "planned for; choose a whole number"
        )
    return slices


class _Abstract:
    """A model and its optimizer's state without numbers: shapes, dtypes and places."""

    def __init__(self, config: ModelConfig, mesh: Mesh, args: GRPOConfig, lora: LoRAConfig | None) -> None:
        self.config, self.mesh, self.args = config, mesh, args
        self.settings = learner_settings(args)
        self.platform = mesh.devices.flat[0].platform
        self.dtype: Any = compute_dtype(self.platform, args.dtype)
        self.execution = execution_on(self.platform, args.gradient_checkpointing, args.scan_layers)
        self.optimizer = make_optimizer(self.settings.optimizer, make_schedule(self.settings.schedule, _STEPS))
        weights = self.on_mesh(_in_dtype(model_specs(config), self.dtype))
        trained = _in_dtype(adapter_specs(config, lora) if lora else model_specs(config), jnp.float32)
        self.masters = self.on_mesh(trained)
        state = jax.eval_shape(lambda params: TrainState(params, self.optimizer.init(params)), self.masters)
        self.state: Any = _placed(state, state_specs(config, mesh, state), mesh)
        self.frozen = Frozen(weights, self.scalar) if lora else None
        # the masters themselves where they have the dtype
        self.policy_name = "masters" if self.dtype == jnp.float32 else "policy"
        self.policy = self.masters if self.dtype == jnp.float32 else self.on_mesh(_in_dtype(trained, self.dtype))
        residents = {"masters": self.state.params, "optimizer": self.state.opt_state}
        residents |= {"policy": self.policy} if self.dtype != jnp.float32 else {}
        residents |= {"base": weights} if lora else {}
        residents |= {"reference": weights} if args.beta > 0 and not lora else {}
        self.residents: dict[str, Any] = residents
        self.reference = weights
        self.own = {self.policy_name: self.policy} | ({"base": weights} if lora else {})
        self.dropout_rate = lora.lora_dropout if lora else 0.0

    @property
    def scalar(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(self.mesh, PartitionSpec()))

    def on_mesh(self, weights: Params) -> Params:
        return _placed(weights, partition_specs(self.config, self.mesh, weights), self.mesh)

    def fitting_tokens(self, left: float) -> int:
        if self.platform == "cpu":
            return CPU_MICRO_BATCH_TOKENS
        return fitting_tokens(self.config, self.dtype.itemsize, self.args.gradient_checkpointing, left)


def _rollout(
    of_model: _Abstract, num_rows: int, longest: tuple[int, int], left: float
) -> tuple[list[Program], CacheShape, float]:
    """The engine's programs, the shape of its cache, and the bytes that a device gets before it decodes."""
    config, args = of_model.config, of_model.args
    mesh, copies = decoding_mesh(of_model.mesh, args.decoding_tp), args.decoding_weights != "same"
    given = joined(of_model.frozen, of_model.policy)
    gathered = _placed(given, partition_specs(config, mesh, given), mesh)
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(gathered), strict=True)
    gathers = not all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
    params = gathered
    if copies:
        params = jax.eval_shape(lambda params: decoding_params(config, params, args.decoding_weights), given)
        params = _placed(params, partition_specs(config, mesh, params), mesh)
    kept = own_bytes({"weights": params}) if gathers or copies else 0.0
    at_once = kept + (own_bytes({"weights": gathered}) if gathers and copies else 0.0)  # while they are converted
    if at_once > left:
        raise UnfitError(
            f"the weights that rollouts are decoded with take {at_once / 1e9:.1f} GB of a device, and "
            f"{left / 1e9:.1f} GB are left beside weights and optimizer",
            in_rollout=True,
        )
    asked = None if args.kv_cache_dtype == "same" else args.kv_cache_dtype
    kv_dtype = cache_dtype(asked, args.decoding_weights, of_model.dtype)
    shape = _cache_shape(of_model, mesh, num_rows, longest, kv_dtype, left - kept)
    admits, decodes, params, cache = traced_programs(config, mesh, shape, params, kv_dtype)
    per_shard, num_chunks = -(-num_rows // num_data_shards(mesh)), -(-longest[1] // CHUNK_STEPS)
    num_prompts, num_waves = -(-per_shard // shape.share), -(-per_shard // shape.num_slots)
    together = prompts_at_once(shape)
    num_pieces = shape.num_prompt_columns // piece_columns(together, shape.num_prompt_columns)
    arguments = {**({"rollout weights": params} if kept else of_model.own), "kv cache": cache}
    programs = [
        Program("admit", admits, arguments, -(-num_prompts // together), num_pieces),
        Program("decode_chunk", decodes, arguments, num_waves * num_chunks, CHUNK_STEPS),
    ]
    return programs, shape, own_bytes({"weights": gathered}) - own_bytes({"weights": given}) if gathers else 0.0


def _cache_shape(
    of_model: _Abstract, mesh: Mesh, num_rows: int, longest: tuple[int, int], kv_dtype: Any, free: float
) -> CacheShape:
    """Of each data shard's keys and values, at their largest, as the engine would have it with so much free memory."""
    config, args, num_shards = of_model.config, of_model.args, num_data_shards(mesh)
    most_columns = longest_columns(*longest, CHUNK_STEPS)
    budget = FREE_PART * free if args.kv_cache_gb is None else args.kv_cache_gb * 1e9
    num_tokens = int(min(budget, _UNLIMITED) / token_bytes(config, kv_dtype, mesh.shape["tp"]))
    allowed = Plan(num_tokens, config.num_layers, args.max_concurrent_rows)
    try:
        groups = [args.num_generations] * (num_rows // args.num_generations)
        shape = allowed.first_shape(groups, num_shards, most_columns)
    except ValueError as error:
        told = f"{free / 1e9:.1f} GB of a device are left for a rollout's keys and values: {error}"
        raise UnfitError(told, in_rollout=True) from error
    columns = bucket(-(-longest[1] // CHUNK_STEPS) * CHUNK_STEPS, CACHE_COLUMNS)
    return allowed.smaller(CacheShape(shape.num_slots, shape.share, shape.num_prompt_columns, columns))


@dataclass(frozen=True, eq=False)
class _Training:
    """The learner's programs, how many micro-batches there are of a step, and tokens of the largest on a device."""

    programs: tuple[Program, ...]
    num_parts: int
    cells: int


def _training(of_model: _Abstract, slices: Slices, longest: tuple[int, int], tokens: int) -> _Training:
    """The learner's programs."""
    config, mesh, args, updates = of_model.config, of_model.mesh, of_model.args, slices.steps_per_rollout
    settings = of_model.settings.objective
    rows = [_row(index // args.num_generations, longest, args, updates) for index in range(slices.rows)]
    parts, _ = pack(rows, num_data_shards(mesh), tokens, (), args.share_prefix, longest)
    largest = max(parts, key=lambda part: part.num_cells)
    batch = jax.tree.map(lambda x: _struct(x, NamedSharding(mesh, ROWS)), largest.batch)
    static: dict[str, Any] = {"config": config, "mesh": mesh}
    of_step = {**static, "settings": settings, "execution": of_model.execution}
    totals = jax.eval_shape(lambda params: zero_totals(params, **static, settings=settings), of_model.policy)
    totals = _placed(totals, totals_specs(config, mesh, of_model.policy, totals), mesh)
    scalar, num_parts = of_model.scalar, len(parts)
    counts: Any = jax.tree.unflatten(jax.tree.structure(Denominators(jnp.zeros(()), jnp.zeros(()))), [scalar, scalar])
    dropout_key = _key(mesh) if of_model.dropout_rate else None
    of_policy = (of_model.policy, totals, batch, counts, scalar, of_model.frozen, dropout_key)
    steps = micro_step.trace(*of_policy, **of_step, dropout_rate=of_model.dropout_rate)
    sums = across_shards.trace(totals, **static)
    grads = _placed(
        jax.eval_shape(lambda totals: totals.grads, sums.out_info),
        partition_specs(config, mesh, of_model.masters),
        mesh,
    )
    update = apply_update.trace(of_model.state, grads, scalar, optimizer=of_model.optimizer, **static)
    state = {"masters": of_model.state.params, "optimizer": of_model.state.opt_state}
    programs = [
        Program("micro_step", steps, {**of_model.own, "gradients": totals}, num_parts * updates),
        Program("across_shards", sums, {"gradients": totals}, updates),
        Program("apply_update", update, {**state, "gradients": grads}, updates),
    ]
    # of all rows, by the policy before updates other than the first one, or to find the tokens of high entropy
    own_passes = slices.per_rollout - 1 + updates * (args.top_entropy_quantile < 1)
    passes = own_passes + slices.per_rollout * (args.beta > 0)
    if passes:
        of_reference = {"base" if of_model.frozen else "reference": of_model.reference}
        params = joined(of_model.frozen, of_model.policy) if own_passes else of_model.reference
        scores = score.trace(params, batch, **of_step)
        programs.insert(0, Program("score", scores, of_model.own if own_passes else of_reference, num_parts * passes))
    cells = largest.num_cells // num_data_shards(mesh)
    return _Training(tuple(programs), num_parts, cells)


def _row(group: int, longest: tuple[int, int], args: GRPOConfig, updates: int) -> Row:
    """A completion of the greatest length, with what its update needs."""
    prompt, completion = (np.zeros(length, np.int32) for length in longest)
    logp = np.zeros(longest[1], np.float32)
    return Row(
        group,
        prompt,
        completion,
        np.ones(longest[1], bool),
        0.0,
        logp,
        old_logp=logp if updates > 1 else None,
        ref_logp=logp if args.beta > 0 else None,
        sampler_logp=logp if args.rollout_correction != "none" else None,
        policy_mask=np.ones(longest[1], bool) if args.top_entropy_quantile < 1 else None,
    )


def _key(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Of random numbers, the same on all devices."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return _struct(key, NamedSharding(mesh, PartitionSpec()))


def own_bytes(trees: Mapping[str, Any]) -> float:
    """Of these arrays on each device; those without a place lie whole on all."""
    return sum(_own_bytes(leaf) for leaf in jax.tree.leaves(dict(trees)))


def _own_bytes(x: Any) -> float:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return float(math.prod(shape) * np.dtype(x.dtype).itemsize)


def _in_dtype(specs: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)


def _placed(tree: Any, specs: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda x, spec: _struct(x, NamedSharding(mesh, spec)), tree, specs)


def _struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
