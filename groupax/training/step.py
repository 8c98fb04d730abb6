"""The gradient of a micro-batch, and the update of the weights by the sum of them (see `accumulator`)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Key

from groupax.core.settings.objective import ObjectiveSettings
from groupax.core.types import Metrics
from groupax.models.adapted import Dropout, LowRank, apply_adapter, row_norms
from groupax.models.attention import local_tokens
from groupax.models.config import ModelConfig
from groupax.models.execution import Execution
from groupax.models.experts import Routing, load_balancing_loss
from groupax.models.layers import gather_with_inverse
from groupax.models.logprobs import grouped_logprobs
from groupax.models.params import layout_of, partition_specs
from groupax.models.specs import Params
from groupax.objective.aggregation import Denominators, MetricSums, join
from groupax.objective.losses import old_logprobs, policy_objective
from groupax.parallel.collectives import psum, to_device
from groupax.parallel.mesh import DATA, TOKENS, Layout
from groupax.training.accumulator import LOGP_DIFF, ROUTER_LOSS, ROWS, GradAccumulator, accumulator_pspecs, added
from groupax.training.images import feature_values
from groupax.training.packing import MicroBatch
from groupax.training.state import REPLICATED, TrainState, shard_state, state_shardings, update_by_layer


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Puts host arrays on the devices, their first dim sharded over the data axes."""
    return to_device(batch, NamedSharding(mesh, ROWS))


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
    frozen: Params | None = None,
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
        frozen: Params | None,
        norms: Any,
        dropout_key: Array | None,
    ) -> tuple[GradAccumulator, tuple[Array, Array]]:
        inputs, dropout, image_dropout = batch.loss_inputs, None, None
        if dropout_key is not None:
            dropout = Dropout(dropout_key, local_tokens(batch.dropout_ids, layout), jnp.float32(settings.dropout_rate))
            if batch.features is not None and batch.features.dropout_ids is not None:
                image_dropout = replace(dropout, tokens=batch.features.dropout_ids)

        def loss_fn(params: Params) -> tuple[Array, tuple[MetricSums, Array, Array]]:
            weights = apply_adapter(frozen, params, dropout, image_dropout, norms)
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
        return added(accumulator, grads, loss, join(metrics, engine)), (logp, entropy)

    params_pspecs = partition_specs(config, mesh, params)
    pspecs = accumulator_pspecs(config, mesh, params, accumulator)
    frozen_pspecs = frozen and partition_specs(config, mesh, frozen)
    norms = row_norms(frozen, params)
    is_change = lambda x: isinstance(x, LowRank)  # noqa: E731
    norms_pspecs = jax.tree.map(lambda x: x.magnitude if is_change(x) else None, params_pspecs, is_leaf=is_change)
    in_specs = (params_pspecs, pspecs, ROWS, REPLICATED, REPLICATED, frozen_pspecs, norms_pspecs, REPLICATED)
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(pspecs, ROWS), check_vma=False)
    return program(params, accumulator, batch, counts, entropy_coef, frozen, norms, dropout_key)


def router_loss_coef(config: ModelConfig, settings: ObjectiveSettings) -> float:
    """Returns the weight of the load-balancing loss: the setting, or else the model's own."""
    assert config.experts is not None, "the model has no experts"
    coef = settings.router_aux_loss_coef
    return config.experts.aux_loss_coef if coef is None else coef


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
        feature_values(settings.config.vision, batch.features, params),
    )
    return (
        gather_with_inverse(logp, batch.cells, batch.slots),
        gather_with_inverse(entropy, batch.cells, batch.slots),
        routings,
    )


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
