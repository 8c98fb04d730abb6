"""Master weights and optimizer state: their sharding, their update, and copies of the weights."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from groupax.models.config import ModelConfig
from groupax.models.params import partition_specs, weight_dtype
from groupax.models.specs import Params
from groupax.parallel.mesh import splits_model
from groupax.parallel.pytree import pytree
from groupax.training.offload import host_shardings, update_by_layer

REPLICATED = PartitionSpec()


@pytree
class TrainState:
    """The arrays that an optimizer step changes.

    Attributes:
        params: float32 master weights of the trained model or adapter.
        opt_state: state of the optimizer.
    """

    params: Params
    opt_state: Any


@partial(jax.jit, static_argnames=("optimizer", "config", "mesh", "offload_optimizer"))
def init_state(
    params: Params,
    *,
    optimizer: optax.GradientTransformation,
    config: ModelConfig,
    mesh: Mesh,
    offload_optimizer: bool = False,
) -> TrainState:
    """Creates a state with its own float32 copy of the weights; optimizer state is sharded like its weight.

    Args:
        params: weights to train.
        optimizer: static.
        config: static.
        mesh: static.
        offload_optimizer: static; whether to keep the optimizer state of weights in host memory.
    """
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    state = _shard_state(TrainState(masters, optimizer.init(masters)), config, mesh)
    if offload_optimizer:  # device_put to host memory does not itself constrain how the arrays are sharded
        return jax.device_put(state, state_shardings(config, mesh, state, offload_optimizer))
    return state


def _shard_state(state: TrainState, config: ModelConfig, mesh: Mesh) -> TrainState:
    if not splits_model(mesh):
        return state

    def constrained(x: Array, spec: PartitionSpec) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(constrained, state, state_pspecs(config, mesh, state))


def state_pspecs(config: ModelConfig, mesh: Mesh, state: TrainState) -> Any:
    """Returns the pspecs of a state: optimizer state like the weight of its name and shape, all else replicated."""
    weights = jax.tree_util.tree_leaves_with_path(state.params)
    specs = jax.tree.leaves(partition_specs(config, mesh, state.params))
    by_name = {(path, weight.shape): spec for (path, weight), spec in zip(weights, specs, strict=True)}

    def pspec(path: tuple[Any, ...], x: Any) -> PartitionSpec:
        names = (path[first:] for first in range(len(path)))
        return next((by_name[name, x.shape] for name in names if (name, x.shape) in by_name), REPLICATED)

    return jax.tree_util.tree_map_with_path(pspec, state)


def state_shardings(config: ModelConfig, mesh: Mesh, state: TrainState, offload_optimizer: bool) -> Any:
    """Returns the shardings of a state.

    Args:
        config: model.
        mesh: devices.
        state: state of arrays or shapes.
        offload_optimizer: whether the optimizer state of weights is in host memory.
    """
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_pspecs(config, mesh, state))
    if not offload_optimizer:
        return shardings
    return TrainState(shardings.params, host_shardings(state.params, state.opt_state, shardings.opt_state))


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

    Args:
        state: donated.
        grads: gradients of the loss, summed over all rows.
        loss: loss of the step.
        optimizer: static.
        config: static.
        mesh: static.
        offload_optimizer: static; whether the optimizer state is in host memory and is updated layer by layer.

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
    updated = _shard_state(TrainState(params, opt_state), config, mesh)
    return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), updated, state), grad_norm, is_finite


@partial(jax.jit, static_argnames=("dtype",))
def cast_params(params: Params, *, dtype: Any) -> Params:
    """Copies weights in a dtype, so that an update of the originals, which donates them, does not free the copy."""
    return jax.tree_util.tree_map_with_path(lambda path, x: jnp.array(x, weight_dtype(path, dtype), copy=True), params)


@partial(jax.jit, static_argnames=("alpha",), donate_argnames=("reference",))
def ema_update(reference: Params, policy: Params, *, alpha: float) -> Params:
    """Computes alpha policy + (1 - alpha) reference, in the reference's dtype."""

    def mixed(ref: Array, new: Array) -> Array:
        return (alpha * new.astype(jnp.float32) + (1.0 - alpha) * ref.astype(jnp.float32)).astype(ref.dtype)

    return jax.tree.map(mixed, reference, policy)


@jax.jit
def norms_and_update_ratios(before: Params, after: Params) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Computes the norm of each of N weights after an update, and the norm of its change over the larger of its norms
    before and after; 0 where both are 0."""

    def norm(x: Array) -> Array:
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))

    def norms(tree: Params) -> Array:
        return jnp.stack([norm(x) for x in jax.tree.leaves(tree)])

    larger = jnp.maximum(norms(before), norms(after))
    change = norms(jax.tree.map(jnp.subtract, after, before))
    return norms(after), change / jnp.where(larger > 0, larger, 1.0)
