"""An optimizer's state in the memory of the hosts, from where it comes to the devices for an update, part by part.

    host        moments of layer 0   of layer 1   ...                      moments of layer 0   of layer 1
    device           └────► update ──────────────────────────────────────────────┘▲
                                    └──── only then ────► └────► update ───────────────────────────┘

A part is a layer, or a weight beside the layers. A part comes when the one before has gone, so that the devices hold
a few parts' moments and never all of them. What an optimizer has beside what is of a weight, as the number of steps,
stays on the devices.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float

from groupax.parallel.memory import DEVICE, HOST, on_host

# The names on the way to a leaf.
Path = tuple[str, ...]


def places_on_host(params: Any, opt_state: Any, places: Any) -> Any:
    """Where an optimizer's state lies that is kept on the hosts.

    Args:
        params: the weights that it is of.
        opt_state: of arrays or shapes.
        places: a sharding for each of them on devices.
    """
    weights = _leaves(params)

    def place(path: Any, _: Any, sharding: Any) -> Any:
        return sharding.with_memory_kind(HOST) if _is_of_weight(_path(path), weights) else sharding

    return jax.tree_util.tree_map_with_path(place, opt_state, places)


def offloaded(params: Any, opt_state: Any) -> Any:
    """The state of an optimizer with what it has for these weights on the hosts."""
    weights = _leaves(params)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: on_host(x) if _is_of_weight(_path(path), weights) else x, opt_state
    )


def updated_in_parts(
    optimizer: optax.GradientTransformationExtraArgs,
    params: Any,
    opt_state: Any,
    grads: Any,
    grad_norm: Float[Array, ""],
    finite: Bool[Array, ""],
    places: tuple[Any, Any],
) -> tuple[Any, Any]:
    """New weights and a new state of the optimizer, or the old ones if something is not finite.

    Args:
        optimizer: what it does with a weight depends on that weight alone, on `grad_norm` and on the number of steps.
        params: master weights.
        opt_state: on the hosts.
        grads: of the weights.
        grad_norm: of all gradients together.
        finite: whether there is an update.
        places: shardings of the weights and of the state, that of the latter from `places_on_host`.
    """
    weights, gradients, moments = map(_leaves, (params, grads, opt_state))
    weight_places, moment_places = map(_leaves, places)
    new: dict[Path, Any] = {}  # weights by their paths
    new_moments: dict[Path, Any] = {}
    before: list[tuple[dict[Path, Any], Path]] = []  # what the part before has made: where it is to go
    for names in _parts(weights):
        own, own_grads = (_nested(leaves, names) for leaves in (weights, gradients))
        like = jax.eval_shape(optimizer.init, own)
        # what is of no weight is not held back: it is computed once for all parts, as if there were none
        shared, paths = _divided(_leaves(like), weights)
        given = [moments[path] for path in paths]
        if before:
            given, made = lax.optimization_barrier((given, [table[path] for table, path in before]))
            for (table, path), value in zip(before, made, strict=True):
                table[path] = value
        came = {path: moments[path] for path in shared} | {
            path: jax.device_put(x, moment_places[path].with_memory_kind(DEVICE))
            for path, x in zip(paths, given, strict=True)
        }
        old_state = _filled(like, came)
        updates, state = optimizer.update(own_grads, old_state, own, grad_norm=grad_norm)
        updated = optax.apply_updates(own, updates)
        pairs = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (updated, state), (own, old_state))
        new |= {path: lax.with_sharding_constraint(x, weight_places[path]) for path, x in _leaves(pairs[0]).items()}
        new_moments |= {path: _sent(x, moment_places[path]) for path, x in _leaves(pairs[1]).items()}
        before = [(new, path) for path in names] + [(new_moments, path) for path in paths]
    return _filled(params, new), _filled(opt_state, new_moments)


def _sent(x: Array, place: Any) -> Array:
    """The array at its place; how it is split has to be said on the devices."""
    return jax.device_put(lax.with_sharding_constraint(x, place.with_memory_kind(DEVICE)), place)


def _parts(weights: Mapping[Path, Any]) -> list[list[Path]]:
    """The weights' paths, those of a layer together."""
    parts: dict[Path, list[Path]] = {}
    for path in weights:
        parts.setdefault(path[:2], []).append(path)
    return list(parts.values())


def _nested(leaves: Mapping[Path, Any], names: list[Path]) -> Any:
    """Some of the leaves as a tree of dicts, with the same names on the way to them."""
    tree: dict[str, Any] = {}
    for *way, last in names:
        branch = tree
        for name in way:
            branch = branch.setdefault(name, {})
        branch[last] = leaves[*way, last]
    return tree


def _filled(like: Any, leaves: Mapping[Path, Any]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_path(path)], like)


def _leaves(tree: Any) -> dict[Path, Any]:
    return {_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _path(keys: Any) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _is_of_weight(path: Path, weights: Mapping[Path, Any]) -> bool:
    return any(path[first:] in weights for first in range(len(path)))


def _divided(paths: Iterable[Path], weights: Mapping[Path, Any]) -> tuple[list[Path], list[Path]]:
    """The paths of what is of no weight, and the others."""
    of_weights = [path for path in paths if _is_of_weight(path, weights)]
    return [path for path in paths if path not in of_weights], of_weights
