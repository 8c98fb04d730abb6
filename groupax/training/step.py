"""The gradient of an optimizer step, accumulated over micro-batches.

Each device of the data axes computes its own rows and accumulates gradients and metrics locally; one all-reduce per
step adds them up. Gradients of weights that are sharded over a data axis are reduce-scattered in each micro-batch, and
each device accumulates its own shard.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Key

from groupax.core.settings.objective import ObjectiveSettings
from groupax.core.types import Metrics
from groupax.models.adapted import Dropout, FrozenBase, apply_adapter
from groupax.models.attention import local_tokens
from groupax.models.config import ModelConfig
from groupax.models.execution import Execution
from groupax.models.experts import Routing, load_balancing_loss
from groupax.models.layers import gather_with_inverse
from groupax.models.logprobs import grouped_logprobs
from groupax.models.params import layout_of, partition_specs
from groupax.models.specs import Params
from groupax.models.vision.tower import encode_images
from groupax.objective.aggregation import Denominators, MetricSums, join, merge, psum_metrics
from groupax.objective.losses import old_logprobs, policy_objective, zero_metrics
from groupax.parallel.collectives import psum, to_device
from groupax.parallel.mesh import DATA, TOKENS, Layout
from groupax.parallel.pytree import pytree
from groupax.training.packing import MicroBatch
from groupax.training.state import REPLICATED, TrainState, shard_state, state_shardings, update_by_layer

ROWS = PartitionSpec(DATA)
LOGP_DIFF = "rollout/logp_diff"  # |log-prob of the engine - log-prob of the trainer|, of the same weights
ROUTER_LOSS = "router/aux_loss"  # load-balancing loss of a mixture of experts, before its coefficient


@pytree
class GradAccumulator:
    """The sums over an optimizer step's micro-batches: one per device, along a first dim, until `all_reduce`."""

    grads: Params  # float32 gradients of the loss
    loss: Float[Array, ""]  # loss of the step so far
    metrics: MetricSums  # metrics of the step so far


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Puts host arrays on the devices, their first dim sharded over the data axes."""
    return to_device(batch, NamedSharding(mesh, ROWS))


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


@dataclass(frozen=True)
class StepSettings:
    """The static settings of the programs that compute log-probs and gradients."""

    config: ModelConfig  # architecture of the model
    objective: ObjectiveSettings  # settings of the loss
    mesh: Mesh  # devices
    execution: Execution  # how the model's layers are executed
    dropout_rate: float = 0.0  # dropout of an adapter's inputs


@partial(jax.jit, static_argnames="settings", donate_argnames="accumulator")
def micro_step(
    params: Params,
    accumulator: GradAccumulator,
    batch: MicroBatch,
    counts: Denominators,
    entropy_coef: Float[Array, ""],
    frozen: FrozenBase | None = None,
    dropout_key: Key[Array, ""] | None = None,
    *,
    settings: StepSettings,
) -> tuple[GradAccumulator, tuple[Float[Array, "B T"], Float[Array, "B T"]]]:
    """Adds a micro-batch's loss, gradients and metrics to each device's accumulator.

    Returns:
        The new accumulator, and the log-probs of the batch's targets under `params` with the entropies of their
        distributions.
    """
    config, objective, mesh = settings.config, settings.objective, settings.mesh
    layout = layout_of(config, mesh)

    def local(
        params: Params,
        accumulator: GradAccumulator,
        batch: MicroBatch,
        counts: Denominators,
        entropy_coef: Array,
        frozen: FrozenBase | None,
        dropout_key: Array | None,
    ) -> tuple[GradAccumulator, tuple[Array, Array]]:
        inputs, dropout, image_dropout = batch.loss_inputs, None, None
        if dropout_key is not None:
            dropout = Dropout(dropout_key, local_tokens(batch.dropout_ids, layout), jnp.float32(settings.dropout_rate))
            if batch.features is not None and batch.features.dropout_ids is not None:
                image_dropout = replace(dropout, tokens=batch.features.dropout_ids)

        def loss_fn(params: Params) -> tuple[Array, tuple[MetricSums, Array, Array]]:
            weights = apply_adapter(frozen, params, dropout, image_dropout)
            logp, entropy, routings = _logprobs(settings, weights, batch, layout)
            loss, metrics = policy_objective(logp, entropy, inputs, counts, objective, entropy_coef)
            if config.experts:
                balance = _balance(routings, batch, layout)
                loss = loss + router_loss_coef(config, objective) * balance / counts.num_tokens
                metrics = join(metrics, MetricSums({ROUTER_LOSS: balance}, {}, {}))
            return loss, (metrics, logp, entropy)

        (loss, (metrics, logp, entropy)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        logp_diff = jnp.where(inputs.mask, jnp.abs(old_logprobs(logp, inputs) - inputs.rollout_logp), 0.0)
        engine = MetricSums({f"{LOGP_DIFF}_mean": jnp.sum(logp_diff)}, {}, {f"{LOGP_DIFF}_max": jnp.max(logp_diff)})
        before = jax.tree.map(lambda x: x[0], accumulator)
        after = GradAccumulator(
            grads=jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), before.grads, grads),
            loss=before.loss + loss,
            metrics=merge(before.metrics, join(metrics, engine)),
        )
        return jax.tree.map(lambda x: x[None], after), (logp, entropy)

    params_pspecs = partition_specs(config, mesh, params)
    pspecs = accumulator_pspecs(config, mesh, params, accumulator)
    frozen_pspecs = frozen and _frozen_pspecs(config, mesh, frozen)
    in_specs = (params_pspecs, pspecs, ROWS, REPLICATED, REPLICATED, frozen_pspecs, REPLICATED)
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(pspecs, ROWS), check_vma=False)
    return program(params, accumulator, batch, counts, entropy_coef, frozen, dropout_key)


def router_loss_coef(config: ModelConfig, settings: ObjectiveSettings) -> float:
    """Returns the weight of the load-balancing loss: the setting, or else the model's own."""
    assert config.experts is not None, "the model has no experts"
    coef = settings.router_aux_loss_coef
    return config.experts.aux_loss_coef if coef is None else coef


def _frozen_pspecs(config: ModelConfig, mesh: Mesh, frozen: FrozenBase) -> Any:
    leaves = jax.tree.leaves(partition_specs(config, mesh, frozen.params))
    return jax.tree.unflatten(jax.tree.structure(frozen), [*leaves, REPLICATED])


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


@partial(jax.jit, static_argnames="settings")
def score(
    params: Params, batch: MicroBatch, *, settings: StepSettings
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes log-probs of the batch's targets under some weights, and the entropies of their distributions."""
    config, mesh = settings.config, settings.mesh

    def local(params: Params, batch: MicroBatch) -> tuple[Array, Array]:
        return _logprobs(settings, params, batch, layout_of(config, mesh))[:2]

    in_specs = (partition_specs(config, mesh, params), ROWS)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=ROWS, check_vma=False)(params, batch)


def _logprobs(
    settings: StepSettings, params: Params, batch: MicroBatch, layout: Layout
) -> tuple[Array, Array, list[Routing]]:
    logp, entropy, routings = grouped_logprobs(
        settings.config,
        params,
        batch.ragged,
        settings.objective.temperature,
        settings.execution,
        settings.objective.entropy_bonus,
        layout,
        _features(settings.config, params, batch),
    )
    return (
        gather_with_inverse(logp, batch.cells, batch.slots),
        gather_with_inverse(entropy, batch.cells, batch.slots),
        routings,
    )


def _features(config: ModelConfig, params: Params, batch: MicroBatch) -> Float[Array, "levels F D"] | None:
    """Returns the features of the micro-batch's images; None if there are none."""
    features = batch.features
    if features is None:
        return None
    if features.known is not None:
        return jnp.swapaxes(features.known, 0, 1)
    assert config.vision is not None, "the model sees images"
    assert features.images is not None, "features are computed"
    assert features.rows is not None, "features are computed"
    return encode_images(config.vision, params["vision"], features.images)[:, features.rows]


def _balance(routings: list[Routing], batch: MicroBatch, layout: Layout) -> Float[Array, ""]:
    """Computes this shard's share of the micro-batch's load-balancing loss, times the micro-batch's loss tokens."""
    num_tokens = lax.psum(jnp.sum(batch.loss_inputs.mask).astype(jnp.float32), DATA)
    counted = local_tokens(batch.ragged.slots >= 0, layout)
    return psum(load_balancing_loss(routings, counted, TOKENS), layout.axis("tokens")) * num_tokens


def policy_loss(metrics: Metrics, entropy_coef: float, config: ModelConfig, settings: ObjectiveSettings) -> float:
    """Returns the loss of a step without its entropy bonus and without a mixture's load-balancing loss."""
    loss = metrics["loss"] + (entropy_coef * metrics["entropy"] if entropy_coef else 0.0)
    return loss - router_loss_coef(config, settings) * metrics[ROUTER_LOSS] if config.experts else loss


@partial(jax.jit, static_argnames=("optimizer", "config", "mesh", "offload_optimizer"), donate_argnames=("state",))
def apply_update(
    state: TrainState,
    grads: Params,
    loss: Float[Array, ""],
    *,
    optimizer: optax.GradientTransformationExtraArgs,
    config: ModelConfig,
    mesh: Mesh,
    offload_optimizer: bool = False,
) -> tuple[TrainState, Float[Array, ""], Bool[Array, ""]]:
    """Updates the master weights, unless the loss or a gradient is not finite.

    Returns:
        The new state (unchanged if the update is skipped), the gradient's global norm before clipping, and whether the
        update was applied.
    """
    grad_norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    if offload_optimizer:
        shardings = state_shardings(config, mesh, state, offload_optimizer)
        targets = (shardings.params, shardings.opt_state)
        new = update_by_layer(optimizer, state.params, state.opt_state, grads, grad_norm, is_finite, targets)
        return TrainState(*new), grad_norm, is_finite
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params, grad_norm=grad_norm)
    params: Any = optax.apply_updates(state.params, updates)
    updated = shard_state(TrainState(params, opt_state), config, mesh)
    return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), updated, state), grad_norm, is_finite
