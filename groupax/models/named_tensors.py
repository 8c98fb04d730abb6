"""Weights as named tensors on the host and back, as files have them and as they travel from a trainer to a server."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from groupax.models.adapted import AdaptedWeight, LowRank
from groupax.models.specs import Params, Spec


def trained_params(specs: Any, params: Any) -> Any:
    """What an adapter trains of the weights that the forward pass reads (see `models.adapted.joined`).

    Args:
        specs: `lora.adapter_specs`.
        params: the joined weights.
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
    """For each place in a checkpoint the weights there: their indices among the tree's leaves, and their specs."""
    found: dict[str, list[tuple[int, Spec]]] = {}
    for index, spec in enumerate(jax.tree.leaves(specs)):
        found.setdefault(spec.name, []).append((index, spec))
    return found


def join_tensors(parts: Sequence[tuple[Spec, np.ndarray]]) -> dict[str, np.ndarray]:
    """The tensors that the weights of one place make: one each, one for each index of one, or one of all."""
    spec, array = parts[0]
    if spec.is_stacked:
        return dict(zip(spec.tensor_names, array, strict=True))
    arrays = [array for _, array in sorted(parts, key=lambda part: part[0].first_row)]
    return {spec.name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays)}


def param_leaves(specs: Params, params: Params) -> list[Any]:
    """The weights in the order of their specs.

    Raises:
        ValueError: some are quantized ones.
    """
    leaves = jax.tree.structure(specs).flatten_up_to(params)
    if not all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves):
        raise ValueError("quantized weights cannot be exchanged; train an adapter on them, which can")
    return leaves


def host_tensors(specs: Params, leaves: list[Any], wanted: Container[str] | None = None) -> dict[str, np.ndarray]:
    """Tensors on the host, without a copy where the devices allow it.

    Args:
        specs: of the weights.
        leaves: the weights (see `param_leaves`).
        wanted: their places; None for all.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, parts in specs_by_name(specs).items():
        if wanted is None or name in wanted:
            tensors |= join_tensors([(spec, np.asarray(leaves[index])) for index, spec in parts])
    return tensors


def replace_tensors(specs: Params, params: Params, tensors: Mapping[str, np.ndarray]) -> Params:
    """Weights on the devices with some of their tensors replaced, in the dtypes and on the devices that they have.

    Args:
        specs: of the weights.
        params: left as they are.
        tensors: by name, in the shapes of the specs; must not change any more, as the weights may be the same memory.
    """
    specs_of, structure = jax.tree.flatten(specs)
    leaves = [_replaced(*pair, tensors) for pair in zip(specs_of, structure.flatten_up_to(params), strict=True)]
    return jax.block_until_ready(jax.tree.unflatten(structure, leaves))


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
        array = array if spec.num_rows is None else array[spec.first_row : spec.first_row + spec.shape[0]]
    return jax.device_put(array.astype(weight.dtype, copy=False), weight.sharding)
