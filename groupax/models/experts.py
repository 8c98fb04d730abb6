"""Mixtures of experts: a router sends each token through a few of many feed-forward parts."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from groupax.models.config import Activation, Experts
from groupax.models.layers import ACTIVATIONS, einsum_f32, sum_last
from groupax.pytree import pytree

# Rows times their group's matrix, [E, O, I]: with the matrix as checkpoints have it, as in `layers.linear`.
_ROWS_BY_GROUP = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


@pytree
class Routing:
    """Where a layer's router sent M tokens.

    Attributes:
        probs: of all E experts, float32.
        chosen: the experts of each token, likeliest first.
    """

    probs: Float[Array, "M E"]
    chosen: Int[Array, "M A"]


def mixture(
    experts: Experts,
    x: Float[Array, "M D"],
    router: Float[Array, "E D"],
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    down: Float[Array, "E D F"],
    activation: Activation = "silu",
) -> tuple[Float[Array, "M D"], Routing]:
    """The sum over each token's likeliest experts of weight * down(activation(gate x) * up x).

    The weights are the softmax of the router's logits, of all experts, divided by their sum if `experts.normalized`
    (arXiv:2401.04088, section 2.1). Tokens are sorted by expert, so that each matrix multiplies its own tokens
    together; no token is dropped.
    """
    logits = einsum_f32("md,ed->me", x, router)
    exps = jnp.exp(logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    probs = exps * (1.0 / sum_last(exps))
    weights, chosen = lax.top_k(probs, experts.per_token)
    if experts.normalized:
        weights = weights * (1.0 / jnp.sum(weights, axis=-1, keepdims=True))

    M, A = chosen.shape
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.sum(jax.nn.one_hot(chosen.reshape(-1), experts.num, dtype=jnp.int32), axis=0)
    rows = _permuted(jnp.repeat(x, A, axis=0), order)
    gated = ACTIVATIONS[activation](_by_group(rows, gate, sizes)) * _by_group(rows, up, sizes)
    out = _permuted(_by_group(gated, down, sizes), jnp.argsort(order)).reshape(M, A, -1)
    weights = weights.astype(x.dtype)
    total = out[:, 0] * weights[:, :1]
    for place in range(1, A):  # in this order, whatever surrounds it
        total = total + out[:, place] * weights[:, place : place + 1]
    return total, Routing(probs, chosen)


def load_balancing_loss(
    routings: list[Routing], counted: Bool[Array, "M"], num_shards_axes: tuple[str, ...] = ()
) -> Float[Array, ""]:
    """E sum_e f_e P_e: smallest, `per_token`, if the router spreads tokens evenly (arXiv:2101.03961, equations 4 to 6).

    f_e is how many of its choices fell on expert e, per token; P_e is its mean probability. Both are means over all
    layers with experts, as in `transformers`.

    Args:
        routings: of the layers with experts.
        counted: tokens that are real.
        num_shards_axes: mesh axes over which the tokens are spread, inside a shard_map. The result is then a shard's
            part; the sum of the parts is the loss of all tokens.
    """
    E = routings[0].probs.shape[1]
    real = counted[:, None]
    chosen, probs = jnp.zeros(E), jnp.zeros(E)
    for routing in routings:
        by_token = jnp.sum(jax.nn.one_hot(routing.chosen, E), axis=1)
        chosen = chosen + jnp.sum(by_token, axis=0, where=real)
        probs = probs + jnp.sum(routing.probs, axis=0, where=real)
    num = jnp.sum(counted).astype(jnp.float32) * np.float32(len(routings))
    if num_shards_axes:
        chosen, num = lax.psum((chosen, num), num_shards_axes)
    num = jnp.maximum(num, 1.0)
    return E * jnp.sum(lax.stop_gradient(chosen) / num * probs / num)


def _by_group(rows: Float[Array, "R I"], weights: Float[Array, "E O I"], sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
    """Each row times the matrix of its group; the rows lie in the order of their groups."""
    return lax.ragged_dot_general(rows, weights, sizes, _ROWS_BY_GROUP)


def _permuted(x: Float[Array, "R D"], order: Int[Array, "R"]) -> Float[Array, "R D"]:
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")
