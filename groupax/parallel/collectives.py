"""Collectives inside a `shard_map`, with the gradient that each one's use calls for.

Along a mesh axis a value is *replicated* when all devices hold the same value, *sharded* when each holds its own slice,
and *partial* when it stands for the sum over the devices. A loss is replicated along the axes that split a model; the
gradient of a replicated value is replicated, and that of a sharded value is sharded.

Each function takes the name of a mesh axis. Without one (None) it returns its input.

| function | forward | backward |
|---|---|---|
| `psum_grad` | identity | psum |
| `psum` | psum | identity |
| `all_gather` | all_gather | reduce_scatter |
| `all_gather_invariant` | all_gather | each device's own slice |
| `reduce_scatter` | reduce_scatter | all_gather |
| `all_to_all` | all_to_all | all_to_all |
"""

from functools import partial

import jax
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

Axis = str | None


def axis_index(axis: Axis) -> Int[Array, ""] | int:
    """Returns the device's index along the axis."""
    return 0 if axis is None else lax.axis_index(axis)


def axis_size(axis: Axis) -> int:
    """Returns the number of devices along the axis."""
    return 1 if axis is None else lax.axis_size(axis)


def psum_grad(x: Float[Array, "..."], axis: Axis) -> Float[Array, "..."]:
    """Returns a replicated value that each device uses differently; its gradients are summed (Megatron-LM's f)."""
    return x if axis is None else _psum_grad(x, axis)


def psum(x: Float[Array, "..."], axis: Axis) -> Float[Array, "..."]:
    """Sums a partial value into a replicated one (Megatron-LM's g)."""
    return x if axis is None else _psum(x, axis)


def all_gather(x: Shaped[Array, "..."], axis: Axis, dim: int, reduce_dtype: str = "float32") -> Shaped[Array, "..."]:
    """Gathers a value sharded along `dim`, which each device then uses differently.

    The devices' gradients are summed in `reduce_dtype`, and each device receives those of its slice.
    """
    return x if axis is None else _all_gather(x, axis, dim, reduce_dtype)


def all_gather_invariant(x: Shaped[Array, "..."], axis: Axis, dim: int) -> Shaped[Array, "..."]:
    """Gathers a value sharded along `dim` into a replicated one, whose gradient is the same on all devices."""
    return x if axis is None else _all_gather_invariant(x, axis, dim)


def reduce_scatter(x: Float[Array, "..."], axis: Axis, dim: int) -> Float[Array, "..."]:
    """Sums a partial value into one sharded along `dim`."""
    return x if axis is None else lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(x: Float[Array, "..."], axis: Axis, split_dim: int, concat_dim: int) -> Float[Array, "..."]:
    """Reshards a value from `concat_dim` to `split_dim`."""
    return x if axis is None else lax.all_to_all(x, axis, split_dim, concat_dim, tiled=True)


def local_slice(x: Shaped[Array, "..."], axis: Axis, dim: int) -> Shaped[Array, "..."]:
    """Returns the device's slice along `dim` of a replicated value. Its gradient is partial."""
    if axis is None:
        return x
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum_grad(x: Array, axis: str) -> Array:
    del axis
    return x


_psum_grad.defvjp(lambda x, _axis: (x, None), lambda axis, _, gradient: (lax.psum(gradient, axis),))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum(x: Array, axis: str) -> Array:
    return lax.psum(x, axis)


_psum.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda _axis, _, gradient: (gradient,))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather_invariant(x: Array, axis: str, dim: int) -> Array:
    return lax.all_gather(x, axis, axis=dim, tiled=True)


_all_gather_invariant.defvjp(
    lambda x, axis, dim: (_all_gather_invariant(x, axis, dim), None),
    lambda axis, dim, _, gradient: (local_slice(gradient, axis, dim),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_gather(x: Array, axis: str, dim: int, reduce_dtype: str) -> Array:
    del reduce_dtype
    return lax.all_gather(x, axis, axis=dim, tiled=True)


_all_gather.defvjp(
    lambda x, axis, dim, _: (lax.all_gather(x, axis, axis=dim, tiled=True), None),
    lambda axis, dim, dtype, _, gradient: (reduce_scatter(gradient.astype(dtype), axis, dim).astype(gradient.dtype),),
)
