"""Conversion between weights on devices and named tensors on the host, for files and for sending them to a server."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from groupax.models.adapted import AdaptedWeight, LowRank
from groupax.models.spec import Spec
from groupax.models.specs import Params


def trained_params(specs: Any, params: Any) -> Any:
    """Selects an adapter's weights from those that the forward pass reads (see `models.adapted.joined`).

    Args:
        specs: Specs of the adapter (`lora.adapter_specs`).
        params: Joined weights of base and adapter.
    """
    if isinstance(specs, LowRank):
        assert isinstance(params, AdaptedWeight), "joined with this adapter"
        return params.change
    if isinstance(specs, dict):
        return {name: trained_params(each, params[name]) for name, each in specs.items()}
    if isinstance(specs, list):
        return [trained_params(spec, each) for spec, each in zip(specs, params, strict=True)]
    return params


def specs_by_name(specs: Params) -> dict[str, list[tuple[int, Spec]]]:
    """Groups specs by their name in a checkpoint; each comes with its index among the tree's leaves."""
    found: dict[str, list[tuple[int, Spec]]] = {}
    for index, spec in enumerate(jax.tree.leaves(specs)):
        found.setdefault(spec.name, []).append((index, spec))
    return found


def join_tensors(parts: Sequence[tuple[Spec, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the checkpoint's tensors for the weights of one name.

    A stacked weight becomes one tensor per index; weights that are rows of one tensor are concatenated.
    """
    spec, array = parts[0]
    if spec.is_stacked:
        return dict(zip(spec.tensor_names, array, strict=True))
    if len(parts) == 1:
        return {spec.name: np.ascontiguousarray(spec.reordered(array))}
    fused = np.empty(spec.fused_shape, array.dtype)
    for each, rows in parts:
        fused[each.fused_index(_whole(each))] = rows
    return {spec.name: np.ascontiguousarray(spec.reordered(fused))}


def _whole(spec: Spec) -> tuple[slice, ...]:
    return (slice(None),) * len(spec.shape)


def param_leaves(specs: Params, params: Params) -> list[Any]:
    """Returns the weights in the order of their specs.

    Raises:
        ValueError: Some weights are quantized.
    """
    leaves = jax.tree.structure(specs).flatten_up_to(params)
    if not all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves):
        raise ValueError("quantized weights cannot be exchanged; train an adapter on them, which can")
    return leaves


def host_tensors(specs: Params, leaves: list[Any], names: Container[str] | None = None) -> dict[str, np.ndarray]:
    """Returns weights as tensors on the host, without a copy if the devices allow it.

    Args:
        specs: Specs of the weights.
        leaves: Weights (see `param_leaves`).
        names: Names of the requested weights in a checkpoint; None for all.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, parts in specs_by_name(specs).items():
        if names is None or name in names:
            tensors |= join_tensors([(spec, np.asarray(leaves[index])) for index, spec in parts])
    return tensors


def replace_tensors(specs: Params, params: Params, tensors: Mapping[str, np.ndarray]) -> Params:
    """Returns weights with some of their tensors replaced; dtypes and shardings stay the same.

    Args:
        specs: Specs of the weights.
        params: Old weights, which are not modified.
        tensors: New tensors by name, in the shapes of the specs. They must not be modified afterwards, since the
            weights may share their memory.
    """
    leaves, structure = jax.tree.flatten(specs)
    weights = [_replaced(*pair, tensors) for pair in zip(leaves, structure.flatten_up_to(params), strict=True)]
    return jax.block_until_ready(jax.tree.unflatten(structure, weights))


def _replaced(spec: Spec, weight: jax.Array, tensors: Mapping[str, np.ndarray]) -> jax.Array:
    given = [(index, tensors[name]) for index, name in enumerate(spec.tensor_names) if name in tensors]
    if not given:
        return weight
    if spec.is_stacked:
        array = np.array(weight)
        for index, tensor in given:
            array[index] = tensor
    else:
        [(_, array)] = given
        array = spec.reordered(array)[spec.fused_index(_whole(spec))]
    return jax.device_put(array.astype(weight.dtype, copy=False), weight.sharding)
