"""Weights on a mesh: initialization, shardings, and how a device gathers the weights that it multiplies."""

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from groupax.core.settings.compute import ReduceDtype
from groupax.models.adapted import AdaptedWeight, LowRank
from groupax.models.config import ModelConfig
from groupax.models.specs import FLOAT32, Params, Spec, model_specs
from groupax.parallel.collectives import all_gather, psum_grad, to_device
from groupax.parallel.mesh import GATHERED, Layout, layout_for

Dims = tuple[str | None, ...]


def split_dims(config: ModelConfig) -> dict[str, int]:
    """Returns the dims that a mesh may shard, by their names in `parallel.mesh.RULES`, in indivisible units."""
    by_head = config.qk_norm != "all_heads"  # otherwise a norm's statistic spans all heads
    sizes = {
        "embed": config.hidden_size,
        "vocab": config.vocab_size,
        "heads": config.num_heads if by_head else 1,
    }
    if config.latent is None:
        sizes["kv_heads"] = config.num_kv_heads if by_head else 1
    else:
        sizes["latent"] = math.gcd(config.latent.rank, config.latent.query_rank or 0)
    if not all(map(config.has_experts, range(config.num_layers))):
        sizes["ffn"] = config.ffn_size
    if config.experts is not None:
        sizes |= {"expert_ffn": config.experts.ffn_size, "expert": config.experts.num}
        if config.experts.shared_ffn_size:
            sizes["shared_ffn"] = config.experts.shared_ffn_size
    return sizes


def layout_of(config: ModelConfig, mesh: Mesh) -> Layout:
    """Returns the layout of the model on a mesh."""
    return layout_for(split_dims(config), mesh)


def param_shardings(config: ModelConfig, mesh: Mesh) -> Any:
    """Returns the sharding of each weight on `mesh`, in the structure of the parameters."""
    layout = layout_of(config, mesh)
    return jax.tree.map(lambda spec: NamedSharding(mesh, layout.spec(spec.axes)), model_specs(config))


def init_params(config: ModelConfig, key: Key[Array, ""], mesh: Mesh, dtype: Any = jnp.float32) -> Params:
    """Initializes random weights on `mesh`; a weight's values depend only on the key and its name in a checkpoint."""
    return _initializer(config, mesh, jnp.dtype(dtype))(key)


@lru_cache(maxsize=16)
def _initializer(config: ModelConfig, mesh: Mesh, dtype: Any) -> Callable[[Key[Array, ""]], Params]:
    """Returns a jitted function that initializes weights with a key."""
    specs = model_specs(config)

    def init(spec: Spec, key: Array) -> Array:
        own = jnp.float32 if spec.is_float32 else dtype
        if spec.init in ("ones", "zeros"):
            return jnp.full(spec.shape, float(spec.init == "ones"), own)
        label = spec.name if spec.num_rows is None else f"{spec.name}[{spec.first_row}]"
        weight_key = jax.random.fold_in(key, zlib.crc32(label.encode()))
        if spec.init == "log_uniform":
            return jnp.log(jax.random.uniform(weight_key, spec.shape, minval=0.01, maxval=16.0)).astype(own)
        return (0.02 * jax.random.normal(weight_key, spec.shape, jnp.float32)).astype(dtype)

    def init_weights(key: Array) -> Params:
        return jax.tree.map(lambda spec: init(spec, key), specs)

    return jax.jit(init_weights, out_shardings=param_shardings(config, mesh))


def weight_dtype(path: tuple[Any, ...], dtype: Any) -> Any:
    """Returns the dtype of the weight at a path of the tree when the weights are cast to a dtype."""
    return jnp.float32 if jax.tree_util.keystr(path[-1:], simple=True) in FLOAT32 else dtype


def partition_specs(config: ModelConfig, mesh: Mesh, params: Any) -> Any:
    """Returns the pspec of each array in a tree of weights, in the same structure.

    Args:
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
    if weight is None:
        return None
    if isinstance(weight, dict):
        return {name: _specs(layout, spec[name], each) for name, each in weight.items()}
    if isinstance(weight, list):
        return [_specs(layout, own, each) for own, each in zip(spec, weight, strict=True)]
    if isinstance(weight, LowRank):
        out_dim, in_dim = spec.axes
        magnitude = None if weight.magnitude is None else layout.spec((out_dim,))
        return LowRank(layout.spec((None, in_dim)), layout.spec((out_dim, None)), weight.scale, magnitude)
    leaves, structure = jax.tree.flatten(weight)
    if isinstance(weight, AdaptedWeight):
        change = _specs(layout, spec, weight.change)
        own = jax.tree.leaves((_specs(layout, spec, weight.base), change, change.magnitude))
        return jax.tree.unflatten(structure, [*own, *[PartitionSpec()] * (len(leaves) - len(own))])
    own = layout.spec(spec.axes) if jax.tree_util.treedef_is_leaf(structure) else PartitionSpec()
    return jax.tree.unflatten(structure, [own] * len(leaves))


def gather_weights(
    layout: Layout, specs: dict[str, Spec], weights: Params, reduce_dtype: ReduceDtype = "float32"
) -> Params:
    """Gathers the weights of a layer that are sharded over fsdp, in the form in which a device multiplies them.

    Args:
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
        magnitude = gather_weight(layout, (out_dim,), weight.change.magnitude, reduce_dtype)
        norms = gather_weight(layout, (out_dim,), weight.norms)
        # where the matrix is sharded over a model axis, one of a and b is replicated, and its gradients are summed
        a = a if out_dim in GATHERED else psum_grad(a, layout.axis(out_dim))
        if in_dim not in GATHERED:
            b, magnitude = jax.tree.map(lambda x: psum_grad(x, layout.axis(in_dim)), (b, magnitude))
        return replace(weight, base=base, change=LowRank(a, b, weight.change.scale, magnitude), norms=norms)
    place = next((place for place, dim in enumerate(dims) if dim in GATHERED), None)
    if not isinstance(weight, Array) or place is None:
        return weight
    return all_gather(weight, layout.axis(dims[place]), place, reduce_dtype)
