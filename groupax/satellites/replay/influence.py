"""The parts of rows in the gradient of an optimizer step.

The loss of a step is a sum over rows, whose denominators are counted once, so its gradient is one too:

    g = sum_r g_r        share_r = <g_r, g> / <g, g>        sum_r share_r = 1

To first order a row's share is its part in what a step along the gradient does to the loss. An optimizer that scales
each weight's gradient, such as AdamW, takes another step: what a row did there, only leaving it out tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from groupax.core.types import Row
from groupax.models.specs import Params
from groupax.parallel.collectives import to_host
from groupax.training.learner import Learner


@dataclass(frozen=True)
class Influence:
    """The parts of a step's rows in its gradient.

    Attributes:
        shares: Share of each part; they add up to 1 over the parts that are finite. NaN for one that is not.
        norms: Norm of each part's gradient; NaN for one that is not finite.
        norm: Norm of the sum of those that are finite.
    """

    shares: tuple[float, ...]
    norms: tuple[float, ...]
    norm: float


def influence_of(learner: Learner, rows: Sequence[Row], parts: Sequence[Sequence[int]]) -> Influence:
    """Returns the influence of parts of a step's rows on its gradient, before the update."""
    norms, dots = _products(learner, rows, parts)
    total = float(np.nansum(dots))
    shares = dots / total if total > 0 else np.where(np.isnan(dots), np.nan, 0.0)
    return Influence(tuple(shares.tolist()), tuple(np.sqrt(norms).tolist()), max(total, 0.0) ** 0.5)


def _products(learner: Learner, rows: Sequence[Row], parts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the squared norm of each part's gradient, and its product with the sum of all that are finite."""
    squares, dots = np.zeros(len(parts)), np.zeros(len(parts))
    total: Any = None
    for number, gradient in enumerate(learner.gradients(rows, parts)):
        squares[number] = to_host(_dot(gradient, gradient))
        if np.isfinite(squares[number]):
            total = gradient if total is None else _sum(total, gradient)
    bad = ~np.isfinite(squares)
    squares[bad] = dots[bad] = np.nan
    for number, gradient in enumerate(learner.gradients(rows, parts)):
        if not bad[number]:
            dots[number] = to_host(_dot(gradient, total))
    return squares, dots


@jax.jit
def _dot(a: Params, b: Params) -> Float[Array, ""]:
    return sum((jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)), jnp.float32(0.0))


@jax.jit
def _sum(a: Params, b: Params) -> Params:
    return jax.tree.map(jnp.add, a, b)
