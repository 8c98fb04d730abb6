"""The learner's programs for the updates on a rollout."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from groupax.config import GRPOConfig
from groupax.models.adapted import apply_adapter
from groupax.models.execution import Execution
from groupax.models.params import partition_specs
from groupax.objective.aggregation import Denominators
from groupax.parallel.mesh import num_data_shards
from groupax.planning.abstract import AbstractModel, sharded_structs, struct_with
from groupax.planning.programs import Program, host_bytes
from groupax.rollouts.state import UpdateSchedule
from groupax.training.batch import attention_cost_with, pack
from groupax.training.state import apply_update
from groupax.training.step import ROWS, accumulator_pspecs, all_reduce, micro_step, score, zero_grads
from groupax.types import Row


@dataclass(frozen=True, eq=False)
class Training:
    """The learner's programs for a rollout.

    Attributes:
        programs: The programs, in order.
        num_micro_batches: Number of micro-batches of an optimizer step.
        cells: Tokens of the largest micro-batch on a device, padding included.
    """

    programs: tuple[Program, ...]
    num_micro_batches: int
    cells: int


def trace_training(
    model_state: AbstractModel, execution: Execution, schedule: UpdateSchedule, longest: tuple[int, int], tokens: int
) -> Training:
    """Traces the learner's programs for micro-batches of at most `tokens` tokens on each device."""
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
    return Training(programs, len(micro_batches), largest.num_tokens // num_data_shards(mesh))


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
        config=model_state.config,
        mesh=model_state.mesh,
        settings=model_state.settings.objective,
        execution=execution,
    )
    return [Program("score", trace, arguments, num_micro_batches * passes, scans_layers=execution.scan_layers)]


def _trace_update(
    model_state: AbstractModel, execution: Execution, batch: Any, num_micro_batches: int, updates: int
) -> list[Program]:
    """Traces the programs of an optimizer step."""
    config, mesh, scalar = model_state.config, model_state.mesh, model_state.scalar
    static: dict[str, Any] = {"config": config, "mesh": mesh}
    objective = {**static, "settings": model_state.settings.objective}
    totals = jax.eval_shape(lambda params: zero_grads(params, **objective), model_state.policy)
    totals = sharded_structs(totals, accumulator_pspecs(config, mesh, model_state.policy, totals), mesh)
    counts: Any = jax.tree.unflatten(jax.tree.structure(Denominators(jnp.zeros(()), jnp.zeros(()))), [scalar, scalar])
    dropout_key = _key(mesh) if model_state.dropout_rate else None
    trace_step = partial(
        micro_step.trace,
        *(model_state.policy, totals, batch, counts, scalar, model_state.frozen, dropout_key),
        **objective,
        execution=execution,
        dropout_rate=model_state.dropout_rate,
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


def _key(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns a replicated abstract PRNG key."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return struct_with(key, NamedSharding(mesh, PartitionSpec()))
