"""Metrics that add up: over the micro-batches of an optimizer step and over devices."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from groupax.parallel.pytree import pytree


@pytree
class Tally:
    """Partial metrics by name.

    Attributes:
        sums: over loss tokens, to be divided by the step's number of them.
        minima: over rows or tokens.
        maxima: likewise.
    """

    sums: dict[str, Float[Array, ""]]
    minima: dict[str, Float[Array, ""]]
    maxima: dict[str, Float[Array, ""]]


def empty_tally(sums: Sequence[str], minima: Sequence[str], maxima: Sequence[str]) -> Tally:
    """A tally of nothing, with these names."""
    return Tally(
        {name: jnp.float32(0.0) for name in sums},
        {name: jnp.float32(jnp.inf) for name in minima},
        {name: jnp.float32(-jnp.inf) for name in maxima},
    )


def merge(a: Tally, b: Tally) -> Tally:
    """The tally of both parts; they have the same names."""
    return Tally(
        {name: a.sums[name] + b.sums[name] for name in a.sums},
        {name: jnp.minimum(a.minima[name], b.minima[name]) for name in a.minima},
        {name: jnp.maximum(a.maxima[name], b.maxima[name]) for name in a.maxima},
    )


def across_devices(tally: Tally, axes: tuple[str, ...]) -> Tally:
    """The tally of all devices along these mesh axes."""
    return Tally(lax.psum(tally.sums, axes), lax.pmin(tally.minima, axes), lax.pmax(tally.maxima, axes))
