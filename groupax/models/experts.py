"""Mixtures of experts: a router sends each token through a few of many feed-forward blocks."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from groupax.models.config import Experts, GatedActivation
from groupax.models.layers import gated_activation, linear
from groupax.models.matmul import matmul_nt
from groupax.parallel.collectives import all_gather, axis_index, psum, psum_grad, reduce_scatter
from groupax.parallel.kernels import kernel_faults
from groupax.parallel.mesh import REPLICATED, Layout
from groupax.parallel.pytree import pytree
from groupax.parallel.runtime import traced_platform

# The matrices of experts, [E, F, D], [E, F, D] and [E, D, F], and their biases, [E, F], [E, F] and [E, D].
Matrices = tuple[Array, Array, Array]
Biases = tuple[Array | None, Array | None, Array | None]
NO_BIASES: Biases = (None, None, None)
# Rows times their group's matrix, [E, O, I]; the matrices have the layout of checkpoints, as in `layers.linear`.
_ROWS_BY_GROUP = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


@pytree
class Router:
    """The weights of a router.

    Attributes:
        matrix: Makes the experts' logits of a token.
        bias: Is added to these logits; None for none.
        correction: Is added to the experts' scores for the choice only; None for none.
    """

    matrix: Float[Any, "E D"]
    bias: Float[Any, "E"] | None = None
    correction: Float[Any, "E"] | None = None

    def logits(self, x: Float[Array, "M D"]) -> Float[Array, "M E"]:
        """Computes the logits of tokens, in float32."""
        logits = matmul_nt(x, self.matrix)
        return logits if self.bias is None else logits + self.bias.astype(jnp.float32)[None, :]


@pytree
class Routing:
    """The experts to which a layer's router sent M tokens.

    Attributes:
        probs: Scores of all E experts, divided by their sum, float32.
        chosen: The A experts of each token, best first.
    """

    probs: Float[Array, "M E"]
    chosen: Int[Array, "M A"]


def mixture_of_experts(
    experts: Experts,
    x: Float[Array, "M D"],
    router: Router,
    matrices: Matrices,
    biases: Biases = NO_BIASES,
    activation: GatedActivation = "silu",
    layout: Layout = REPLICATED,
    recorded: Int[Array, "M A"] | None = None,
) -> tuple[Float[Array, "M D"], Routing]:
    """Sums weight * down(activation(gate x) * up x) over the chosen experts of each token.

    With `experts.weighs_inputs` the weight multiplies x instead.

    No token is dropped. If experts are sharded over a mesh axis, each device computes its own experts for the tokens of
    all devices.

    Args:
        matrices: Matrices of the experts: gate, up and down.
        recorded: Experts to choose (see `route`).
    """
    weights, routing = route(experts, router.logits(x), router.correction, recorded)
    chosen, num_own = routing.chosen, matrices[0].shape[0]
    expert_axis, ffn_axis = layout.axis("expert"), layout.axis("expert_ffn")
    all_x, all_weights = (
        all_gather(psum_grad(each, ffn_axis), expert_axis, 0) for each in (x, weights.astype(x.dtype))
    )
    local_chosen = chosen
    if expert_axis is not None:
        local_chosen = lax.all_gather(chosen, expert_axis, tiled=True) - axis_index(expert_axis) * num_own
    arrays = all_x, all_weights, local_chosen, matrices, biases[:2]
    # XLA's CPU backend has no grouped matmul. Its lowering costs a matmul with all choices per expert, and the order of
    # its sums depends on the number of rows.
    if traced_platform() == "cpu":
        out = loop_over_experts(*arrays, activation, experts.weighs_inputs)
    else:
        out = ragged_experts(*arrays, activation, experts.weighs_inputs, has_remote=expert_axis is not None)
    out = psum(reduce_scatter(out, expert_axis, 0), ffn_axis)
    if biases[2] is None:
        return out, routing
    weights = all_gather(weights.astype(x.dtype), expert_axis, 0)
    shifts = _chosen_biases(weights, local_chosen, biases[2])
    return out + reduce_scatter(shifts, expert_axis, 0), routing


def route(
    experts: Experts,
    logits: Float[Array, "M E"],
    correction: Float[Array, "E"] | None = None,
    recorded: Int[Array, "M A"] | None = None,
) -> tuple[Float[Array, "M A"], Routing]:
    """Chooses the experts of each token and their weights, in float32.

    The weights are the scores of the chosen experts: the softmax over the logits of all experts (arXiv:2401.04088,
    section 2.1), or their sigmoids (arXiv:2412.19437, equations 13 to 16), divided by their sum if
    `experts.norm_topk_prob`. Experts are chosen by their scores plus the correction, from the groups whose two best
    experts have the largest sums. Where `recorded` is not negative, its experts are chosen instead; their weights are
    this router's, and so are the gradients (rollout routing replay, arXiv:2510.11370).
    """
    if experts.scores == "softmax":
        exps = jnp.exp(logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
        scores = probs = exps / jnp.sum(exps, axis=-1, keepdims=True)
    else:
        scores = jax.nn.sigmoid(logits)
        probs = scores / jnp.sum(scores, axis=-1, keepdims=True)
    if correction is None and experts.num_groups == 1 and recorded is None:
        weights, chosen = lax.top_k(scores, experts.per_token)
    else:
        _, chosen = lax.top_k(_scores_for_choice(experts, scores, correction), experts.per_token)
        chosen = chosen if recorded is None else jnp.where(recorded < 0, chosen, recorded.astype(chosen.dtype))
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.norm_topk_prob:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        # sigmoids may all be 0
        weights = weights / (total if experts.scores == "softmax" else total + np.float32(experts.sum_eps))
    if experts.scale != 1.0:
        weights = weights * np.float32(experts.scale)
    return weights, Routing(probs, chosen)


def _scores_for_choice(
    experts: Experts, scores: Float[Array, "M E"], correction: Float[Array, "E"] | None
) -> Float[Array, "M E"]:
    """Returns the scores by which experts are chosen: minus infinity in the groups that a token does not choose."""
    scores = lax.stop_gradient(scores)
    if correction is not None:
        scores = scores + lax.stop_gradient(correction)[None, :]
    if experts.num_groups == experts.groups_per_token:
        return scores
    by_group = scores.reshape(len(scores), experts.num_groups, -1)
    best_two = jnp.sum(lax.top_k(by_group, 2)[0], axis=-1)
    _, groups = lax.top_k(best_two, experts.groups_per_token)
    is_chosen = jnp.any(jax.nn.one_hot(groups, experts.num_groups, dtype=bool), axis=1)
    return jnp.where(is_chosen[:, :, None], by_group, -jnp.inf).reshape(scores.shape)


def ragged_experts(
    x: Float[Array, "M D"],
    weights: Float[Array, "M A"],
    chosen: Int[Array, "M A"],
    matrices: Matrices,
    biases: tuple[Array | None, Array | None] = (None, None),
    activation: GatedActivation = "silu",
    weighs_inputs: bool = False,
    has_remote: bool = False,
) -> Float[Array, "M D"]:
    """Applies the experts to tokens sorted by expert, so that each expert's matrices are one grouped matmul.

    Biases are those of gate and up. With `has_remote`, choices outside of [0, E) are experts of other devices, which
    contribute nothing here.
    """
    gate, up, down = matrices
    (M, A), E = chosen.shape, gate.shape[0]
    if has_remote:
        chosen = jnp.where((chosen < 0) | (chosen >= E), E, chosen)
    order, inverse, sizes = _sort_by_expert(chosen, E)
    rows = _dispatch(x, order, inverse)
    row_weights = _dispatch(weights.reshape(-1, 1), order, inverse)
    rows = rows * row_weights if weighs_inputs else rows
    gated, upper = _grouped_matmul(rows, gate, sizes), _grouped_matmul(rows, up, sizes)
    gate_bias, up_bias = biases
    if gate_bias is not None and up_bias is not None:
        by_row = jax.nn.one_hot(chosen.reshape(-1)[order], E, dtype=x.dtype)
        gated, upper = gated + linear(by_row, gate_bias.T), upper + linear(by_row, up_bias.T)
    between = gated_activation(activation, gated, upper)
    weighted = between if weighs_inputs else between * row_weights
    if has_remote:  # rows after those of the groups are undefined
        is_own = (jnp.arange(M * A) < jnp.sum(sizes))[:, None]
        out = jnp.where(is_own, _grouped_matmul(jnp.where(is_own, weighted, 0), down, sizes), 0)
    else:
        out = _grouped_matmul(weighted, down, sizes)
    return _combine(M, out, order, inverse)


def loop_over_experts(
    x: Float[Array, "M D"],
    weights: Float[Array, "M A"],
    chosen: Int[Array, "M A"],
    matrices: Matrices,
    biases: tuple[Array | None, Array | None] = (None, None),
    activation: GatedActivation = "silu",
    weighs_inputs: bool = False,
) -> Float[Array, "M D"]:
    """Applies each expert in turn to all tokens, with a weight of 0 where it was not chosen."""

    @jax.checkpoint
    def add(total: Array, expert: tuple[Array, Matrices, tuple[Array | None, Array | None]]) -> tuple[Array, None]:
        index, (gate, up, down), (gate_bias, up_bias) = expert
        weight = jnp.sum(weights, axis=1, keepdims=True, where=chosen == index)
        inputs = x * weight if weighs_inputs else x
        between = gated_activation(activation, linear(inputs, gate, gate_bias), linear(inputs, up, up_bias))
        return total + linear(between if weighs_inputs else between * weight, down), None

    return lax.scan(add, jnp.zeros_like(x), (jnp.arange(len(matrices[0])), matrices, biases))[0]


def _chosen_biases(
    weights: Float[Array, "M A"], chosen: Int[Array, "M A"], bias: Float[Array, "E D"]
) -> Float[Array, "M D"]:
    """Sums the weighted biases of each token's experts; choices outside of [0, E) contribute nothing."""
    by_expert = jnp.sum(jax.nn.one_hot(chosen, len(bias), dtype=weights.dtype) * weights[..., None], axis=1)
    return linear(by_expert, bias.T)


def load_balancing_loss(
    routings: list[Routing], counted: Bool[Array, "M"], axes: tuple[str, ...] = ()
) -> Float[Array, ""]:
    """Computes E sum_e f_e P_e, which is least (`per_token`) if the router spreads tokens evenly.

    f_e is the number of choices per token that fell on expert e; P_e is its mean probability. Both are means over all
    layers with experts, as in `transformers`. Source: arXiv:2101.03961, equations 4 to 6.

    Args:
        axes: Mesh axes over which the tokens are sharded, inside a shard_map. The result is then partial: its sum over
            the devices is the loss of all tokens.
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


def _grouped_matmul(
    rows: Float[Array, "R I"], weights: Float[Array, "E O I"], sizes: Int[Array, "E"]
) -> Float[Array, "R O"]:
    """Multiplies each row by the matrix of its group; rows are sorted by group.

    XLA has kernels for it on TPUs. On NVIDIA GPUs it would multiply all rows by all matrices.
    """
    if traced_platform() == "gpu" and "grouped_matmul" not in kernel_faults():
        from groupax.models.kernels.triton_matmul import grouped_matmul

        return grouped_matmul(rows, weights, sizes)
    return lax.ragged_dot_general(rows, weights, sizes, _ROWS_BY_GROUP)


def _sort_by_expert(
    chosen: Int[Array, "M A"], num_experts: int
) -> tuple[Int[Array, "R"], Int[Array, "R"], Int[Array, "E"]]:
    """Sorts choices in [0, E] stably; returns their order, the place of each in it, and the numbers of the first E.

    On GPUs they are counted, because XLA sorts 65,536 choices in 17 kernels there.
    """
    counts = jax.nn.one_hot(chosen, num_experts + 1, dtype=jnp.int32)
    if traced_platform() != "gpu":
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        return order, jnp.argsort(order), jnp.sum(counts, axis=(0, 1))[:num_experts]
    by_token = jnp.sum(counts, axis=1)
    until = jnp.cumsum(by_token, axis=0)
    firsts = (jnp.cumsum(until[-1]) - until[-1])[None, :] + until - by_token
    # a token chooses an expert once, but can choose several that are on other devices
    repeated = jnp.tril(chosen[:, :, None] == chosen[:, None, :], -1)
    places = jnp.take_along_axis(firsts, chosen, axis=1) + jnp.sum(repeated, axis=2, dtype=jnp.int32)
    inverse = places.reshape(-1)
    order = (
        jnp.zeros_like(inverse)
        .at[inverse]
        .set(jnp.arange(len(inverse), dtype=jnp.int32), unique_indices=True, mode="promise_in_bounds")
    )
    return order, inverse, until[-1][:num_experts]


@jax.custom_vjp
def _dispatch(x: Float[Array, "M D"], order: Int[Array, "R"], inverse: Int[Array, "R"]) -> Float[Array, "R D"]:
    """Returns rows in an order in which each token has R / M of them, and `inverse` finds a token's rows."""
    del inverse
    return x.at[order // (len(order) // len(x))].get(mode="promise_in_bounds")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(num_tokens: int, rows: Float[Array, "R D"], order: Int[Array, "R"], inverse: Int[Array, "R"]) -> Array:
    """Sums the rows of each token, the inverse of `_dispatch` in that each one's gradient is the other.

    Both gather. As transposes of gathers, the gradients would be scatters onto as many zeros.
    """
    del order
    found = rows.at[inverse].get(unique_indices=True, mode="promise_in_bounds")
    return jnp.sum(found.reshape(num_tokens, -1, rows.shape[1]), axis=1)


_dispatch.defvjp(
    lambda x, *places: (_dispatch(x, *places), (len(x), *places)),
    lambda saved, gradient: (_combine(saved[0], gradient, *saved[1:]), None, None),
)
_combine.defvjp(
    lambda num_tokens, rows, *places: (_combine(num_tokens, rows, *places), places),
    lambda _, places, gradient: (_dispatch(gradient, *places), None, None),
)
