"""Sharded weights: their pspecs, and how a device gathers the weights that it multiplies."""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from groupax.models.adapted import AdaptedWeight, LowRank, Params
from groupax.models.config import ModelConfig
from groupax.models.spec import Spec
from groupax.models.specs import layout_of, model_specs
from groupax.parallel.collectives import all_gather, psum_grad, to_device
from groupax.parallel.mesh import GATHERED, Layout
from groupax.settings.compute import ReduceDtype

Dims = tuple[str | None, ...]


def partition_specs(config: ModelConfig, mesh: Mesh, params: Any) -> Any:
    """Returns the pspec of each array in a tree of weights, in the same structure.

    Args:
        config: Architecture of the model.
        mesh: Mesh of the devices.
        params: The model's weights or some of them, possibly adapted or replaced by low-rank changes. Quantized weights
            are replicated.
    """
    specs = model_specs(config)
    # a tied head becomes a separate weight when it is quantized
    return _specs(layout_of(config, mesh), {"head": specs["embed"], **specs}, params)


def shard_params(config: ModelConfig, mesh: Mesh, params: Any) -> Any:
    """Shards weights over a mesh; arrays that have the right sharding already are not copied."""
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
    """Returns the dims of a and b, whose product is the change of a matrix."""
    out_dim, in_dim = spec.axes
    return (None, in_dim), (out_dim, None)


def gather_weights(
    layout: Layout, specs: dict[str, Spec], weights: Params, reduce_dtype: ReduceDtype = "float32"
) -> Params:
    """Gathers the weights of a layer that are sharded over fsdp, in the form in which a device multiplies them.

    Args:
        layout: Sharding of the model.
        specs: Dims of the layer's weights.
        weights: The device's shards.
        reduce_dtype: Dtype in which the devices' gradients are added up.
    """
    if all(layout.axis(dim) is None for dim in (*GATHERED, "heads", "ffn")):
        return weights
    return {name: gather_weight(layout, specs[name].axes, weight, reduce_dtype) for name, weight in weights.items()}


def gather_weight(layout: Layout, dims: Dims, weight: Any, reduce_dtype: ReduceDtype = "float32") -> Any:
    """Gathers one weight with these dims (see `gather_weights`)."""
    if isinstance(weight, AdaptedWeight):
        base = gather_weight(layout, dims, weight.base, reduce_dtype)
        out_dim, in_dim = dims
        a = gather_weight(layout, (None, in_dim), weight.change.a, reduce_dtype)
        b = gather_weight(layout, (out_dim, None), weight.change.b, reduce_dtype)
        # where the matrix is sharded over a model axis, one of a and b is replicated, and its gradients are summed
        a = a if out_dim in GATHERED else psum_grad(a, layout.axis(out_dim))
        b = b if in_dim in GATHERED else psum_grad(b, layout.axis(in_dim))
        return replace(weight, base=base, change=LowRank(a, b))
    place = next((place for place, dim in enumerate(dims) if dim in GATHERED), None)
    if not isinstance(weight, Array) or place is None:
        return weight
    return all_gather(weight, layout.axis(dims[place]), place, reduce_dtype)
