"""The optimizer step: gradients of micro-batches added up, then one update of the master weights.

Each device of the data axes works on its own rows; gradients and metrics are summed over them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from groupax.batch import MicroBatch
from groupax.models.config import ModelConfig
from groupax.models.decoder import Checkpointing
from groupax.models.grouped import grouped_logprobs
from groupax.models.specs import Params
from groupax.objective.aggregation import Denominators
from groupax.objective.objective import TOKEN_SUMS, TokenSums, policy_objective
from groupax.objective.settings import ObjectiveSettings
from groupax.parallel.mesh import DATA
from groupax.pytree import pytree

ROWS = PartitionSpec(DATA)
REPLICATED = PartitionSpec()
LOGP_DIFF = "rollout/logp_diff_mean"


@pytree
class TrainState:
    """What an optimizer step changes.

    Attributes:
        params: master weights, float32.
        opt_state: of the optimizer.
    """

    params: Params
    opt_state: Any


@pytree
class Totals:
    """What an optimizer step's micro-batches add up to.

    Attributes:
        grads: of the loss, float32.
        loss: of the step so far.
        sums: metrics summed over loss tokens.
        logp_diff_max: the largest |log-prob of the engine - log-prob of the trainer| so far.
    """

    grads: Params
    loss: Float[Array, ""]
    sums: TokenSums
    logp_diff_max: Float[Array, ""]


def to_rows(tree: Any, mesh: Mesh) -> Any:
    """Put host arrays on the devices, their first dim split over the data axes."""
    return jax.device_put(tree, NamedSharding(mesh, ROWS))


@partial(jax.jit, static_argnames=("optimizer",))
def init_state(params: Params, *, optimizer: optax.GradientTransformation) -> TrainState:
    """A fresh state with its own float32 copy of the weights."""
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    return TrainState(masters, optimizer.init(masters))


@partial(jax.jit, static_argnames=("dtype",))
def compute_view(params: Params, *, dtype: Any) -> Params:
    """A copy of the master weights in the dtype of the forward pass: what engine and gradients read."""
    return jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), params)


@jax.jit
def zero_totals(params: Params) -> Totals:
    """Totals before the first micro-batch."""
    zero = jnp.float32(0.0)
    return Totals(
        grads=jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params),
        loss=zero,
        sums=dict.fromkeys((*TOKEN_SUMS, LOGP_DIFF), zero),
        logp_diff_max=zero,
    )


@partial(jax.jit, static_argnames=("config", "settings", "mesh", "checkpointing"), donate_argnames=("totals",))
def micro_step(
    params: Params,
    totals: Totals,
    batch: MicroBatch,
    counts: Denominators,
    *,
    config: ModelConfig,
    settings: ObjectiveSettings,
    mesh: Mesh,
    checkpointing: Checkpointing,
) -> Totals:
    """Add a micro-batch's loss, gradients and metrics to the totals of its optimizer step.

    Args:
        params: in the compute dtype.
        totals: donated.
        batch: on the devices (`to_rows`).
        counts: denominators of the whole optimizer step.
        config, settings, mesh, checkpointing: static.
    """

    def local(params: Params, totals: Totals, batch: MicroBatch, counts: Denominators) -> Totals:
        def loss_fn(params: Params) -> tuple[Array, tuple[TokenSums, Array]]:
            logp, entropy = _logprobs(config, settings, checkpointing, params, batch)
            loss, sums = policy_objective(
                logp, entropy, batch.old_logp, batch.ref_logp, batch.advantages, batch.mask, counts, settings
            )
            logp_diff = jnp.where(batch.mask, jnp.abs(lax.stop_gradient(logp) - batch.rollout_logp), 0.0)
            return loss, (sums | {LOGP_DIFF: jnp.sum(logp_diff)}, jnp.max(logp_diff))

        (loss, (sums, logp_diff_max)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        grads, loss, sums = lax.psum((grads, loss, sums), DATA)
        return Totals(
            grads=jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), totals.grads, grads),
            loss=totals.loss + loss,
            sums={name: totals.sums[name] + sums[name] for name in totals.sums},
            logp_diff_max=jnp.maximum(totals.logp_diff_max, lax.pmax(logp_diff_max, DATA)),
        )

    in_specs = (REPLICATED, REPLICATED, ROWS, REPLICATED)
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=REPLICATED, check_vma=False)
    return program(params, totals, batch, counts)


@partial(jax.jit, static_argnames=("optimizer",), donate_argnames=("state", "grads"))
def apply_update(
    state: TrainState, grads: Params, loss: Float[Array, ""], *, optimizer: optax.GradientTransformation
) -> tuple[TrainState, Float[Array, ""], Bool[Array, ""]]:
    """Update the master weights, unless the loss or a gradient is not finite.

    Returns:
        The new state (unchanged if skipped), the gradient's global norm before clipping, and whether the update
        was made.
    """
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    updated = TrainState(params, opt_state)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state), grad_norm, finite


@partial(jax.jit, static_argnames=("config", "settings", "mesh"))
def score(
    params: Params, batch: MicroBatch, *, config: ModelConfig, settings: ObjectiveSettings, mesh: Mesh
) -> Float[Array, "B T"]:
    """Log-probabilities of the batch's targets under some weights (the old policy's or the reference's)."""

    def local(params: Params, batch: MicroBatch) -> Array:
        return _logprobs(config, settings, "none", params, batch)[0]

    return jax.shard_map(local, mesh=mesh, in_specs=(REPLICATED, ROWS), out_specs=ROWS, check_vma=False)(params, batch)


def _logprobs(
    config: ModelConfig,
    settings: ObjectiveSettings,
    checkpointing: Checkpointing,
    params: Params,
    batch: MicroBatch,
) -> tuple[Array, Array]:
    return grouped_logprobs(
        config,
        params,
        batch.prompts,
        batch.prompt_starts,
        batch.prompt_of,
        batch.inputs,
        batch.targets,
        settings.temperature,
        checkpointing,
    )
