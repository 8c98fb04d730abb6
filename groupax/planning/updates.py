"""The learner's programs for the updates on a rollout."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from groupax.config import GRPOConfig
from groupax.models.adapted import joined
from groupax.models.split import partition_specs
from groupax.objective.aggregation import Denominators
from groupax.parallel.mesh import num_data_shards
from groupax.planning.abstract import AbstractModel, placed_structs, struct_at
from groupax.planning.programs import Program, host_bytes
from groupax.rollouts.slices import Slices
from groupax.training.batch import attention_cost_with, pack
from groupax.training.state import apply_update
from groupax.training.step import ROWS, accumulator_pspecs, all_reduce, micro_step, score, zero_grads
from groupax.types import Row


@dataclass(frozen=True, eq=False)
class Training:
    """The learner's programs, how many micro-batches there are of a step, and tokens of the largest on a device."""

    programs: tuple[Program, ...]
    num_parts: int
    cells: int


def training_of(of_model: AbstractModel, slices: Slices, longest: tuple[int, int], tokens: int) -> Training:
    """The learner's programs."""
    config, mesh, args, updates = of_model.config, of_model.mesh, of_model.args, slices.steps_per_rollout
    settings = of_model.settings.objective
    rows = [_row(index // args.num_generations, longest, args, updates) for index in range(slices.rows)]
    attention_cost = attention_cost_with(of_model.execution.attention)
    parts, _ = pack(rows, num_data_shards(mesh), tokens, (), args.share_prefix, longest, attention_cost)
    largest = max(parts, key=lambda part: part.num_cells)
    batch = jax.tree.map(lambda x: struct_at(x, NamedSharding(mesh, ROWS)), largest.batch)
    static: dict[str, Any] = {"config": config, "mesh": mesh}
    of_step = {**static, "settings": settings, "execution": of_model.execution}
    totals = jax.eval_shape(lambda params: zero_grads(params, **static, settings=settings), of_model.policy)
    totals = placed_structs(totals, accumulator_pspecs(config, mesh, of_model.policy, totals), mesh)
    scalar, num_parts = of_model.scalar, len(parts)
    counts: Any = jax.tree.unflatten(jax.tree.structure(Denominators(jnp.zeros(()), jnp.zeros(()))), [scalar, scalar])
    dropout_key = _key(mesh) if of_model.dropout_rate else None
    of_policy = (of_model.policy, totals, batch, counts, scalar, of_model.frozen, dropout_key)
    steps = micro_step.trace(*of_policy, **of_step, dropout_rate=of_model.dropout_rate)
    sums = all_reduce.trace(totals, **static)
    grads = placed_structs(
        jax.eval_shape(lambda totals: totals.grads, sums.out_info),
        partition_specs(config, mesh, of_model.masters),
        mesh,
    )
    of_update = {**static, "optimizer": of_model.optimizer, "offload_optimizer": args.offload_optimizer}
    update = apply_update.trace(of_model.state, grads, scalar, **of_update)
    state = {"masters": of_model.state.params, "optimizer": of_model.state.opt_state}
    programs = [
        Program("micro_step", steps, {**of_model.own, "gradients": totals}, num_parts * updates),
        Program("all_reduce", sums, {"gradients": totals}, updates),
        Program(
            "apply_update",
            update,
            {**state, "gradients": grads},
            updates,
            transferred_bytes=2 * host_bytes(state),  # each part comes and goes
        ),
    ]
    # of all rows, by the policy before updates other than the first one, or to find the tokens of high entropy
    own_passes = slices.per_rollout - 1 + updates * (args.top_entropy_quantile < 1)
    passes = own_passes + slices.per_rollout * (args.beta > 0)
    if passes:
        of_reference = {"base" if of_model.frozen else "reference": of_model.reference}
        params = joined(of_model.frozen, of_model.policy) if own_passes else of_model.reference
        scores = score.trace(params, batch, **of_step)
        scored = of_model.own if own_passes and not args.offload_reference else of_reference
        programs.insert(0, Program("score", scores, scored, num_parts * passes))
    cells = largest.num_cells // num_data_shards(mesh)
    return Training(tuple(programs), num_parts, cells)


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
    return struct_at(key, NamedSharding(mesh, PartitionSpec()))
