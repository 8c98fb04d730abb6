"""What devices exchange inside a shard_map, forward and backward.

Along a mesh axis a value is *whole* where all devices have the same, *split* where each has its own part of it, and
*partial* where the sum over the devices is meant. A loss is whole along the axes that split a model, and the gradient
of something whole is whole, that of something split is split.

Each function takes the name of an axis; without one (None) there is nothing to do, and it returns what it was given.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

Axis = str | None


def axis_index(axis: Axis) -> Int[Array, ""] | int:
    """Of the device along the axis."""
    return 0 if axis is None else lax.axis_index(axis)


def axis_size(axis: Axis) -> int:
    """Devices along the axis."""
    return 1 if axis is None else lax.axis_size(axis)


def psum_grad(x: Float[Array, "..."], axis: Axis) -> Float[Array, "..."]:
    """Something whole, where each device goes on with a part of its own: its gradients are summed."""
    return x if axis is None else _entered(x, axis)


def psum(x: Float[Array, "..."], axis: Axis) -> Float[Array, "..."]:
    """Something partial, made whole."""
    return x if axis is None else _summed(x, axis)


def all_gather_invariant(x: Shaped[Array, "..."], axis: Axis, dim: int) -> Shaped[Array, "..."]:
    """Something split along `dim`, made whole."""
    return x if axis is None else _whole(x, axis, dim)


def all_gather(x: Shaped[Array, "..."], axis: Axis, dim: int) -> Shaped[Array, "..."]:
    """Something split along `dim`, all of it on each device, which goes on with it in its own way.

    The devices' gradients are summed, in float32, and each gets those of its part.
    """
    return x if axis is None else _gathered(x, axis, dim)


def reduce_scatter(x: Float[Array, "..."], axis: Axis, dim: int) -> Float[Array, "..."]:
    """Something partial, made split along `dim`."""
    return x if axis is None else lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(x: Float[Array, "..."], axis: Axis, to_split: int, to_gather: int) -> Float[Array, "..."]:
    """Something split along one dim, split along another instead."""
    return x if axis is None else lax.all_to_all(x, axis, to_split, to_gather, tiled=True)


def local_slice(x: Shaped[Array, "..."], axis: Axis, dim: int) -> Shaped[Array, "..."]:
    """A device's part along `dim` of something whole. Its gradient is partial."""
    if axis is None:
        return x
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _entered(x: Array, axis: str) -> Array:
    del axis
    return x


_entered.defvjp(lambda x, _axis: (x, None), lambda axis, _, gradient: (lax.psum(gradient, axis),))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed(x: Array, axis: str) -> Array:
    return lax.psum(x, axis)


_summed.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda _axis, _, gradient: (gradient,))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _whole(x: Array, axis: str, dim: int) -> Array:
    return lax.all_gather(x, axis, axis=dim, tiled=True)


_whole.defvjp(
    lambda x, axis, dim: (_whole(x, axis, dim), None),
    lambda axis, dim, _, gradient: (local_slice(gradient, axis, dim),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: Array, axis: str, dim: int) -> Array:
    return lax.all_gather(x, axis, axis=dim, tiled=True)


_gathered.defvjp(
    lambda x, axis, dim: (lax.all_gather(x, axis, axis=dim, tiled=True), None),
    lambda axis, dim, _, gradient: (reduce_scatter(gradient.astype(jnp.float32), axis, dim).astype(gradient.dtype),),
)
