"""Master weights and optimizer state: where they are stored and sharded, and copies of the weights."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from groupax.core.settings.compute import VisionSettings
from groupax.models.config import ModelConfig
from groupax.models.lora import residual
from groupax.models.params import partition_specs, weight_dtype
from groupax.models.specs import Params
from groupax.models.weights.casts import cast_unquantized, is_quantized
from groupax.models.weights.checkpoint import Model
from groupax.parallel.collectives import DEVICE, HOST, on_host
from groupax.parallel.mesh import format_mesh, splits_model
from groupax.parallel.pytree import pytree

REPLICATED = PartitionSpec()


@pytree
class TrainState:
    """The arrays that an optimizer step changes."""

    params: Params  # float32 master weights of the trained model or adapter
    opt_state: Any  # state of the optimizer


@partial(jax.jit, static_argnames=("optimizer", "config", "mesh", "offload_optimizer"))
def init_state(
    params: Params,
    *,
    optimizer: optax.GradientTransformation,
    config: ModelConfig,
    mesh: Mesh,
    offload_optimizer: bool = False,
) -> TrainState:
    """Creates a state with its own float32 copy of the weights; optimizer state is sharded like its weight."""
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    state = shard_state(TrainState(masters, optimizer.init(masters)), config, mesh)
    if offload_optimizer:  # device_put to host memory does not itself constrain how the arrays are sharded
        return jax.device_put(state, state_shardings(config, mesh, state, offload_optimizer))
    return state


def shard_state(state: TrainState, config: ModelConfig, mesh: Mesh) -> TrainState:
    """Constrains how a state is sharded."""
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
    """Returns the shardings of a state."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_pspecs(config, mesh, state))
    if not offload_optimizer:
        return shardings
    weights = _leaves(state.params)

    def stored(path: Any, _: Any, on_devices: Any) -> Any:
        return on_devices.with_memory_kind(HOST) if _belongs_to_weight(_path(path), weights) else on_devices

    moments = jax.tree_util.tree_map_with_path(stored, state.opt_state, shardings.opt_state)
    return TrainState(shardings.params, moments)


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


# The keys from the root of a tree to a leaf.
Path = tuple[str, ...]


def offload_state(params: Any, opt_state: Any) -> Any:
    """Moves the optimizer state of these weights to host memory."""
    weights = _leaves(params)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: on_host(x) if _belongs_to_weight(_path(path), weights) else x, opt_state
    )


def update_by_layer(
    optimizer: optax.GradientTransformationExtraArgs,
    params: Any,
    opt_state: Any,
    grads: Any,
    grad_norm: Float[Array, ""],
    is_finite: Bool[Array, ""],
    shardings: tuple[Any, Any],
) -> tuple[Any, Any]:
    """Returns new weights and a new optimizer state, or the old ones if a number is not finite."""
    weights, gradients, moments = map(_leaves, (params, grads, opt_state))
    weight_shardings, moment_shardings = map(_leaves, shardings)
    new: dict[Path, Any] = {}
    new_moments: dict[Path, Any] = {}
    before: list[tuple[dict[Path, Any], Path]] = []  # results of the group before, by the table that holds them
    for names in _groups(weights):
        own, own_grads = (_nested(leaves, names) for leaves in (weights, gradients))
        like = jax.eval_shape(optimizer.init, own)
        # state that does not belong to a weight is not held back: XLA computes it once for all groups
        paths = [path for path in _leaves(like) if _belongs_to_weight(path, weights)]
        shared = [path for path in _leaves(like) if path not in paths]
        fetched = _after([moments[path] for path in paths], before)
        on_devices = {path: moments[path] for path in shared} | {
            path: jax.device_put(x, moment_shardings[path].with_memory_kind(DEVICE))
            for path, x in zip(paths, fetched, strict=True)
        }
        old_state = _filled(like, on_devices)
        updates, state = optimizer.update(own_grads, old_state, own, grad_norm=grad_norm)
        updated = optax.apply_updates(own, updates)
        pairs = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), (updated, state), (own, old_state))
        new |= {path: lax.with_sharding_constraint(x, weight_shardings[path]) for path, x in _leaves(pairs[0]).items()}
        new_moments |= {path: _stored(x, moment_shardings[path]) for path, x in _leaves(pairs[1]).items()}
        before = [(new, path) for path in names] + [(new_moments, path) for path in paths]
    return _filled(params, new), _filled(opt_state, new_moments)


def _after(moments: list[Array], before: list[tuple[dict[Path, Any], Path]]) -> list[Array]:
    """Returns moments that XLA cannot fetch until the results of the group before are complete."""
    if not before:
        return moments
    moments, results = lax.optimization_barrier((moments, [table[path] for table, path in before]))
    for (table, path), value in zip(before, results, strict=True):
        table[path] = value
    return moments


def _stored(x: Array, sharding: Any) -> Array:
    # device_put to host memory does not itself constrain how the array is sharded on the devices
    return jax.device_put(lax.with_sharding_constraint(x, sharding.with_memory_kind(DEVICE)), sharding)


def _groups(weights: Mapping[Path, Any]) -> list[list[Path]]:
    """Returns the paths of the weights, those of a layer together."""
    groups: dict[Path, list[Path]] = {}
    for path in weights:
        groups.setdefault(path[:2], []).append(path)
    return list(groups.values())


def _nested(leaves: Mapping[Path, Any], names: list[Path]) -> Any:
    """Returns some of the leaves as a tree of dicts with the same paths."""
    tree: dict[str, Any] = {}
    for *parents, last in names:
        branch = tree
        for name in parents:
            branch = branch.setdefault(name, {})
        branch[last] = leaves[*parents, last]
    return tree


def _filled(like: Any, leaves: Mapping[Path, Any]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_path(path)], like)


def _leaves(tree: Any) -> dict[Path, Any]:
    return {_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _path(keys: Any) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _belongs_to_weight(path: Path, weights: Mapping[Path, Any]) -> bool:
    return any(path[first:] in weights for first in range(len(path)))


def untrained_weights(model: Model, settings: VisionSettings) -> Params:
    """Returns the weights that a run without an adapter leaves as they are."""
    if model.adapter is not None or not settings.freeze_vision_tower or "vision" not in model.params:
        return {}
    return {"vision": model.params["vision"]}


def check_trainable(model: Model) -> None:
    """Raises a ValueError if all weights of a quantized model are to train."""
    if model.adapter is None and is_quantized(model.params):
        raise ValueError("the weights are quantized and cannot be trained; train an adapter: set lora_r, e.g. to 16")


def frozen_base(model: Model, untrained: Params, dtype: Any) -> Params | None:
    """Returns what trained weights are applied to, in compute dtype; None if all weights are trained.

    Raises:
        ValueError: The model is quantized and has no adapter.
    """
    if model.adapter is not None:
        return cast_unquantized(residual(model.adapter), dtype)
    check_trainable(model)
    return cast_unquantized(untrained, dtype) if untrained else None


def check_dropout(rate: float, mesh: Mesh) -> None:
    """Checks that an adapter's dropout is built for the mesh.

    Raises:
        ValueError: It is not.
    """
    if rate and mesh.shape["tp"] > 1:
        raise ValueError(
            f"mesh {format_mesh(mesh)}: lora_dropout {rate} is not built for inputs that are split over tp; set it to "
            "0, or tp to 1"
        )
