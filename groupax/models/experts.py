"""Mixtures of experts: a router sends each token through a few of many feed-forward parts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from groupax.models.config import Activation, Experts
from groupax.models.layers import gated_activation, linear
from groupax.models.matmul import matmul_nt
from groupax.parallel.collectives import all_gather, axis_index, psum, psum_grad, reduce_scatter
from groupax.parallel.mesh import REPLICATED, Layout
from groupax.parallel.pytree import pytree

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


def mixture_of_experts(
    experts: Experts,
    x: Float[Array, "M D"],
    router: Float[Array, "E D"],
    gate: Float[Array, "e F D"],
    up: Float[Array, "e F D"],
    down: Float[Array, "e D F"],
    activation: Activation = "silu",
    layout: Layout = REPLICATED,
) -> tuple[Float[Array, "M D"], Routing]:
    """The sum over each token's likeliest experts of weight * down(activation(gate x) * up x).

    The weights are the softmax of the router's logits, of all experts, divided by their sum if `experts.norm_topk_prob`
    (arXiv:2401.04088, section 2.1). No token is dropped. Where experts are split over a mesh axis, a device computes
    its own ones for the tokens of all.
    """
    logits = matmul_nt(x, router)
    exps = jnp.exp(logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    probs = exps / jnp.sum(exps, axis=-1, keepdims=True)
    weights, chosen = lax.top_k(probs, experts.per_token)
    if experts.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    apart, within = layout.axis("expert"), layout.axis("expert_ffn")
    all_x, all_weights = (all_gather(psum_grad(each, within), apart, 0) for each in (x, weights.astype(x.dtype)))
    own_chosen = chosen
    if apart is not None:
        own_chosen = lax.all_gather(chosen, apart, tiled=True) - axis_index(apart) * gate.shape[0]
    arrays = all_x, all_weights, own_chosen, gate, up, down
    # XLA's CPU backend has no grouped product; what it makes of one costs as many products as there are experts, of
    # each choice, and the order of its sums depends on the number of rows.
    out = lax.platform_dependent(
        *arrays,
        cpu=partial(loop_over_experts, activation=activation),
        default=partial(ragged_experts, activation=activation, some_elsewhere=apart is not None),
    )
    return psum(reduce_scatter(out, apart, 0), within), Routing(probs, chosen)


def ragged_experts(
    x: Float[Array, "M D"],
    weights: Float[Array, "M A"],
    chosen: Int[Array, "M A"],
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    down: Float[Array, "E D F"],
    activation: Activation,
    some_elsewhere: bool = False,
) -> Float[Array, "M D"]:
    """Tokens through their A experts, sorted by expert, so that each matrix multiplies its own tokens together.

    With `some_elsewhere` choices below 0 or from E on are other devices' experts, which add nothing here.
    """
    (M, A), E = chosen.shape, gate.shape[0]
    if some_elsewhere:
        chosen = jnp.where((chosen < 0) | (chosen >= E), E, chosen)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.sum(jax.nn.one_hot(chosen.reshape(-1), E, dtype=jnp.int32), axis=0)
    rows = _permuted(jnp.repeat(x, A, axis=0), order)
    between = gated_activation(activation, _by_group(rows, gate, sizes), _by_group(rows, up, sizes))
    weighted = between * _permuted(weights.reshape(-1, 1), order)
    if some_elsewhere:  # rows behind the groups' are anything
        is_own = (jnp.arange(M * A) < jnp.sum(sizes))[:, None]
        out = jnp.where(is_own, _by_group(jnp.where(is_own, weighted, 0), down, sizes), 0)
    else:
        out = _by_group(weighted, down, sizes)
    out = _permuted(out, jnp.argsort(order))
    return jnp.sum(out.reshape(M, A, -1), axis=1)


def loop_over_experts(
    x: Float[Array, "M D"],
    weights: Float[Array, "M A"],
    chosen: Int[Array, "M A"],
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    down: Float[Array, "E D F"],
    activation: Activation,
) -> Float[Array, "M D"]:
    """All tokens through each expert in turn, with a weight of 0 where it was not chosen."""

    @jax.checkpoint
    def add(total: Array, expert: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        index, gate, up, down = expert
        weight = jnp.sum(weights, axis=1, keepdims=True, where=chosen == index)
        between = gated_activation(activation, linear(x, gate), linear(x, up))
        return total + linear(between * weight, down), None

    return lax.scan(add, jnp.zeros_like(x), (jnp.arange(gate.shape[0]), gate, up, down))[0]


def load_balancing_loss(
    routings: list[Routing], counted: Bool[Array, "M"], axes: tuple[str, ...] = ()
) -> Float[Array, ""]:
    """E sum_e f_e P_e: smallest, `per_token`, if the router spreads tokens evenly (arXiv:2101.03961, equations 4 to 6).

    f_e is how many of its choices fell on expert e, per token; P_e is its mean probability. Both are means over all
    layers with experts, as in `transformers`.

    Args:
        routings: of the layers with experts.
        counted: tokens that are real.
        axes: mesh axes over which the tokens are spread, inside a shard_map. The result is then a shard's
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
    if axes:
        chosen, num = lax.psum((chosen, num), axes)
    num = jnp.maximum(num, 1.0)
    return E * jnp.sum(lax.stop_gradient(chosen) / num * probs / num)


def _by_group(rows: Float[Array, "R I"], weights: Float[Array, "E O I"], sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
    """Each row times the matrix of its group; the rows lie in the order of their groups."""
    return lax.ragged_dot_general(rows, weights, sizes, _ROWS_BY_GROUP)


def _permuted(x: Float[Array, "R D"], order: Int[Array, "R"]) -> Float[Array, "R D"]:
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")
