"""The sums over the micro-batches of an optimizer step: gradients, loss and metrics.

Each device of the data axes computes its own rows and accumulates gradients and metrics locally; one all-reduce per
step adds them up. Gradients of weights that are sharded over a data axis are reduce-scattered in each micro-batch, and
each device accumulates its own shard.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from groupax.core.settings.objective import ObjectiveSettings
from groupax.models.config import ModelConfig
from groupax.models.params import partition_specs
from groupax.models.specs import Params
from groupax.objective.aggregation import MetricSums, join, merge, psum_metrics
from groupax.objective.losses import zero_metrics
from groupax.parallel.mesh import DATA, TOKENS
from groupax.parallel.pytree import pytree
from groupax.training.state import REPLICATED

ROWS = PartitionSpec(DATA)
LOGP_DIFF = "rollout/logp_diff"  # |log-prob of the engine - log-prob of the trainer|, of the same weights
ROUTER_LOSS = "router/aux_loss"  # load-balancing loss of a mixture of experts, before its coefficient


@pytree
class GradAccumulator:
    """The sums over an optimizer step's micro-batches: one per device, along a first dim, until `all_reduce`."""

    grads: Params  # float32 gradients of the loss
    loss: Float[Array, ""]  # loss of the step so far
    metrics: MetricSums  # metrics of the step so far


def accumulator_pspecs(config: ModelConfig, mesh: Mesh, params: Params, accumulator: GradAccumulator) -> Any:
    """Returns the pspecs of an accumulator: gradients like their weights, after a dim for the devices."""

    def gradient(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(_partial_axes(spec), *spec)

    grads = jax.tree.map(gradient, partition_specs(config, mesh, params))
    return _with_gradient_pspecs(accumulator, grads, ROWS)


def _with_gradient_pspecs(accumulator: GradAccumulator, grads: Any, others: PartitionSpec) -> Any:
    structure, leaves = jax.tree.structure(accumulator), jax.tree.leaves(grads)
    return jax.tree.unflatten(structure, [*leaves, *[others] * (structure.num_leaves - len(leaves))])


def _partial_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes along which the gradients of a weight with this pspec are partial sums."""
    return tuple(axis for axis in TOKENS if axis not in spec)


@partial(jax.jit, static_argnames=("config", "settings", "mesh"))
def zero_grads(params: Params, *, config: ModelConfig, settings: ObjectiveSettings, mesh: Mesh) -> GradAccumulator:
    """Creates each device's accumulator for an optimizer step."""
    accumulator = jax.eval_shape(lambda params: _zeros(params, config, settings), params)
    program = jax.shard_map(
        lambda params: jax.tree.map(lambda x: x[None], _zeros(params, config, settings)),
        mesh=mesh,
        in_specs=(partition_specs(config, mesh, params),),
        out_specs=accumulator_pspecs(config, mesh, params, accumulator),
        check_vma=False,
    )
    return program(params)


def _zeros(params: Params, config: ModelConfig, settings: ObjectiveSettings) -> GradAccumulator:
    zero = jnp.float32(0.0)
    router = MetricSums({ROUTER_LOSS: zero} if config.experts else {}, {}, {})
    engine = MetricSums({f"{LOGP_DIFF}_mean": zero}, {}, {f"{LOGP_DIFF}_max": jnp.float32(-jnp.inf)})
    return GradAccumulator(
        grads=jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params),
        loss=zero,
        metrics=join(join(zero_metrics(settings), router), engine),
    )


def added(accumulator: GradAccumulator, grads: Params, loss: Array, metrics: MetricSums) -> GradAccumulator:
    """Adds a micro-batch to a device's accumulator, inside a shard_map."""
    before = jax.tree.map(lambda x: x[0], accumulator)
    after = GradAccumulator(
        grads=jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), before.grads, grads),
        loss=before.loss + loss,
        metrics=merge(before.metrics, metrics),
    )
    return jax.tree.map(lambda x: x[None], after)


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames=("accumulator",))
def all_reduce(accumulator: GradAccumulator, *, config: ModelConfig, mesh: Mesh) -> GradAccumulator:
    """Adds up the accumulators of all devices; gradients come out sharded like their weights."""
    specs = partition_specs(config, mesh, accumulator.grads)

    def local(accumulator: GradAccumulator) -> GradAccumulator:
        own = jax.tree.map(lambda x: x[0], accumulator)
        by_axes: dict[tuple[str, ...], list[int]] = {}
        leaves, structure = jax.tree.flatten(own.grads)
        for index, spec in enumerate(jax.tree.leaves(specs)):
            by_axes.setdefault(_partial_axes(spec), []).append(index)
        for axes, indices in by_axes.items():
            for index, grad in zip(indices, lax.psum([leaves[index] for index in indices], axes), strict=True):
                leaves[index] = grad
        loss = lax.psum(own.loss, DATA)
        return GradAccumulator(jax.tree.unflatten(structure, leaves), loss, psum_metrics(own.metrics, DATA))

    in_specs = (accumulator_pspecs(config, mesh, accumulator.grads, accumulator),)
    out_specs = _with_gradient_pspecs(accumulator, specs, REPLICATED)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(accumulator)
