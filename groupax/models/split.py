"""Weights that are split over a mesh: where each lies, and how a device gets those that it multiplies."""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from groupax.models.adapted import AdaptedWeight, LowRank, Params
from groupax.models.config import ModelConfig
from groupax.models.specs import Spec, layout_of, model_specs
from groupax.parallel.collectives import all_gather, psum_grad
from groupax.parallel.mesh import Layout
from groupax.parallel.transfer import to_device

Dims = tuple[str | None, ...]


def partition_specs(config: ModelConfig, mesh: Mesh, params: Any) -> Any:
    """Where each array of a tree of weights lies, in its structure.

    Args:
        config: the model.
        mesh: of the devices.
        params: the model's weights, or some of them, maybe with low-rank changes beside or in place of them. Quantized
            ones lie whole on every device.
    """
    specs = model_specs(config)
    # a head that is tied to the embedding is one of its own where it has fewer bits
    return _specs(layout_of(config, mesh), {"head": specs["embed"], **specs}, params)


def shard_params(config: ModelConfig, mesh: Mesh, params: Any) -> Any:
    """The weights on a mesh, split as it says; those that lie there already are not copied."""
    specs = partition_specs(config, mesh, params)
    return to_device(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def _specs(layout: Layout, spec: Any, weight: Any) -> Any:
    if isinstance(weight, dict):
        return {name: _specs(layout, spec[name], each) for name, each in weight.items()}
    if isinstance(weight, list):
        return [_specs(layout, own, each) for own, each in zip(spec, weight, strict=True)]
    if isinstance(weight, LowRank):
        a, b = _low_rank_dims(spec)
        return LowRank(layout.spec(a), layout.spec(b))
    leaves, structure = jax.tree.flatten(weight)
    if isinstance(weight, AdaptedWeight):
        own = [
            *jax.tree.leaves(_specs(layout, spec, weight.base)),
            *_specs(layout, spec, weight.change).__dict__.values(),
        ]
        return jax.tree.unflatten(structure, [*own, *[PartitionSpec()] * (len(leaves) - len(own))])
    own = layout.spec(spec.axes) if jax.tree_util.treedef_is_leaf(structure) else PartitionSpec()
    return jax.tree.unflatten(structure, [own] * len(leaves))


def _low_rank_dims(spec: Spec) -> tuple[Dims, Dims]:
    """Of the change b a of a matrix."""
    of_out, of_in = spec.axes
    return (None, of_in), (of_out, None)


def gather_weights(layout: Layout, specs: dict[str, Spec], weights: Params) -> Params:
    """Weights as a device multiplies them: those that are split over fsdp gathered, by their names."""
    if layout.axis("embed") is None and layout.axis("heads") is None and layout.axis("ffn") is None:
        return weights
    return {name: gather_weight(layout, specs[name].axes, weight) for name, weight in weights.items()}


def gather_weight(layout: Layout, dims: Dims, weight: Any) -> Any:
    """A weight with these dims, likewise."""
    if isinstance(weight, AdaptedWeight):
        base = gather_weight(layout, dims, weight.base)
        of_out, of_in = dims
        a = gather_weight(layout, (None, of_in), weight.change.a)
        b = gather_weight(layout, (of_out, None), weight.change.b)
        # of a and b one is whole where the matrix is split
        a = a if of_out == "embed" else psum_grad(a, layout.axis(of_out))
        b = b if of_in == "embed" else psum_grad(b, layout.axis(of_in))
        return replace(weight, base=base, change=LowRank(a, b))
    if not isinstance(weight, Array) or "embed" not in dims:
        return weight
    return all_gather(weight, layout.axis("embed"), dims.index("embed"))
