"""An optimizer state in host memory, which comes to the devices for an update layer by layer.

    host        moments of layer 0   of layer 1   ...                      moments of layer 0   of layer 1
    device           └────► update ──────────────────────────────────────────────┘▲
                                    └──── only then ────► └────► update ───────────────────────────┘

A group of weights is a layer, or a single weight outside the layers. A group's moments come when those of the group
before have gone, so that the devices hold the moments of a few groups and never of all. State that does not belong to
a weight, such as the number of steps, stays on the devices.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float

from groupax.parallel.collectives import DEVICE, HOST, on_host

# The keys from the root of a tree to a leaf.
Path = tuple[str, ...]


def host_shardings(params: Any, opt_state: Any, shardings: Any) -> Any:
    """Returns shardings of an optimizer state with the state of weights in host memory.

    Args:
        params: weights.
        opt_state: state of arrays or shapes.
        shardings: sharding of each of its arrays on devices.
    """
    weights = _leaves(params)

    def sharding(path: Any, _: Any, on_devices: Any) -> Any:
        return on_devices.with_memory_kind(HOST) if _belongs_to_weight(_path(path), weights) else on_devices

    return jax.tree_util.tree_map_with_path(sharding, opt_state, shardings)


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
    """Returns new weights and a new optimizer state, or the old ones if a number is not finite.

    Args:
        optimizer: optimizer whose update of a weight depends on that weight, `grad_norm` and the number of steps alone.
        params: master weights.
        opt_state: state in host memory.
        grads: gradients of the weights.
        grad_norm: norm of all gradients together.
        is_finite: whether to update.
        shardings: shardings of the weights, and of the state as from `host_shardings`.
    """
    weights, gradients, moments = map(_leaves, (params, grads, opt_state))
    weight_shardings, moment_shardings = map(_leaves, shardings)
    new: dict[Path, Any] = {}
    new_moments: dict[Path, Any] = {}
    before: list[tuple[dict[Path, Any], Path]] = []  # results of the group before, by the table that holds them
    for names in _groups(weights):
        own, own_grads = (_nested(leaves, names) for leaves in (weights, gradients))
        like = jax.eval_shape(optimizer.init, own)
        # state that does not belong to a weight is not held back: XLA computes it once for all groups
        shared, paths = _split(_leaves(like), weights)
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


def _split(paths: Iterable[Path], weights: Mapping[Path, Any]) -> tuple[list[Path], list[Path]]:
    """Splits paths of optimizer state into those that belong to no weight, and the others."""
    of_weights = [path for path in paths if _belongs_to_weight(path, weights)]
    return [path for path in paths if path not in of_weights], of_weights
