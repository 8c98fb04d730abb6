"""The decoder: one forward pass for training, scoring, prefill and decoding.

The pass works on a flat list of M tokens with their positions. What differs between its uses is only which
tokens see which, and that is the caller's `attend`: it gets a layer's queries, keys and values of all M
tokens and returns what each token attended to, and what the layer keeps: its part of a cache, if there is one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from groupax.models.attention import attend
from groupax.models.config import AttentionConfig, ModelConfig, Rope
from groupax.models.execution import DIRECT, Execution
from groupax.models.experts import Routing, mixture_of_experts
from groupax.models.layers import NORMS, Weight, gated_mlp, linear, row_parallel_linear, scaled, vocabulary_logits
from groupax.models.lookup import lookup
from groupax.models.rope import Tables, rope_tables, rotate
from groupax.models.scan_layers import apply_layers
from groupax.models.specs import Params, layer_specs
from groupax.models.split import gather_weight, gather_weights
from groupax.parallel.collectives import Axis, axis_index, axis_size, psum, psum_grad
from groupax.parallel.mesh import REPLICATED, Layout

# (attention settings, the layer's cache or None, queries [M, N, H], keys [M, K, H], values [M, K, H])
# -> (outputs [M, N, H], the layer's updated cache)
Attend = Callable[[AttentionConfig, Any, Array, Array, Array], tuple[Array, Any]]
# What the backward pass finds of a layer: its input alone, its input and the products with weights, or those with each
# other (attention's) too. The rest is computed again.
_SAVED = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "all_dots": jax.checkpoint_policies.dots_saveable,
}


class ForwardOutput(NamedTuple):
    """What a forward pass gives.

    Attributes:
        hidden: states after the final norm, times `hidden_scale`, in the dtype of the parameters.
        caches: what each layer's `attend` returned as its cache.
        routings: where the router of each layer with experts sent the tokens.
    """

    hidden: Float[Array, "M D"]
    caches: list[Any]
    routings: list[Routing]


def _all_but_gathered(primitive: Any, *_args: Any, **_params: Any) -> bool:
    """What the backward pass finds if nothing is to be computed again: all but weights gathered from other devices."""
    return primitive.name != "all_gather"


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "M"],
    positions: Int[Array, "M"],
    attend: Attend,
    caches: Sequence[Any] | None = None,
    execution: Execution = DIRECT,
    layout: Layout = REPLICATED,
) -> ForwardOutput:
    """The forward pass.

    Layers of the same kind are traced once: `attend` may read what is around it, but must change nothing there.

    With a layout, inside a shard_map, a device has its parts of the weights, and `attend` gets its heads; hidden states
    are whole.

    Args:
        config, params: the model.
        tokens, positions: of the flat list.
        attend: see above.
        caches: one per layer, passed to `attend`; None for no caches.
        execution: how it is computed; layers with caches are not scanned.
        layout: how the model is split.
    """
    x = _embedded(params, tokens, layout)
    if config.embedding_scale != 1.0:  # which is of the parameters' dtype itself, as transformers has it
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    tables = {rope: rope_tables(rope, config.max_positions, positions, x.dtype) for rope in config.ropes if rope}

    def layer(x: Array, weights: Params, cache: Any, index: int) -> tuple[Array, Any, Routing | None]:
        weights, attend_as = gather_weights(layout, layer_specs(config, index), weights), config.attention(index)
        h = _normed(config, x, weights.get("attention_norm"))
        attended, cache = _attention(config, index, weights, h, tables, partial(attend, attend_as, cache), layout)
        x = x + _added(config, attended, weights.get("attention_out_norm"))
        h = h if config.block == "parallel" else _normed(config, x, weights.get("mlp_norm"))
        out, routing = _mlp(config, index, weights, h, layout)
        return x + _added(config, out, weights.get("mlp_out_norm")), cache, routing

    if execution.checkpointing != "none":
        layer = jax.checkpoint(layer, static_argnums=3, policy=_SAVED[execution.checkpointing])
    elif layout.axis("embed") is not None:
        layer = jax.checkpoint(layer, static_argnums=3, policy=_all_but_gathered)
    layer = jax.jit(layer, static_argnums=3)
    scans = execution.scan_layers and caches is None
    caches = list(caches) if caches is not None else [None] * config.num_layers

    def numbered(x: Array, weights: Params, index: int) -> tuple[Array, Routing | None]:
        x, caches[index], routing = layer(x, weights, caches[index], config.first_similar_layer(index))
        return x, routing

    kinds = [config.first_similar_layer(index) if scans else index for index in range(config.num_layers)]
    x, routings = apply_layers(numbered, x, params["layers"], kinds)
    routings = [routing for routing in routings if routing is not None]
    return ForwardOutput(scaled(_normed(config, x, params["final_norm"]), config.hidden_scale), caches, routings)


def _embedded(params: Params, tokens: Int[Array, "M"], layout: Layout) -> Float[Array, "M D"]:
    """The tokens' embeddings; of those that other devices have, 0 until they are added up."""
    table, axis = gather_weight(layout, ("vocab", "embed"), params["embed"]), layout.axis("vocab")
    if axis is None:
        return lookup(table, tokens)
    own = tokens - axis_index(axis) * table.shape[0]
    is_own = (own >= 0) & (own < table.shape[0])
    return psum(jnp.where(is_own[:, None], lookup(table, jnp.where(is_own, own, 0)), 0), axis)


def _attention(
    config: ModelConfig,
    index: int,
    weights: Params,
    h: Float[Array, "M D"],
    tables: dict[Rope, Tables],
    attend: Callable[[Array, Array, Array], tuple[Array, Any]],
    layout: Layout,
) -> tuple[Float[Array, "M D"], Any]:
    M, axis = h.shape[0], layout.axis("heads")
    h, weights = psum_grad(h, axis), _within_heads(config, weights, layout)
    q, k = (linear(h, weights[name], weights.get(f"{name}_bias")) for name in ("q", "k"))
    if config.qk_norm == "all_heads":
        q, k = _normed(config, q, weights["q_norm"]), _normed(config, k, weights["k_norm"])
    q = q.reshape(M, -1, config.head_dim)
    k = k.reshape(M, -1, config.head_dim)
    v = linear(h, weights["v"], weights.get("v_bias")).reshape(M, -1, config.head_dim)
    if config.qk_norm in ("head", "each_head"):
        q, k = _normed(config, q, weights["q_norm"]), _normed(config, k, weights["k_norm"])
    if rope := config.ropes[index]:
        q, k = (rotate(x, tables[rope], rope.interleaved) for x in (q, k))
    if axis is not None and layout.axis("kv_heads") is None:
        k, v = (local_kv_heads(x, q.shape[1], axis) for x in (k, v))
    out, cache = attend(q, k, v)
    return row_parallel_linear(out.reshape(M, -1), weights["o"], weights.get("o_bias"), axis), cache


def _within_heads(config: ModelConfig, weights: Params, layout: Layout) -> Params:
    """A layer's weights, where devices have heads of their own: what is whole there gets the gradients of all."""
    axis = layout.axis("heads")
    if axis is None:
        return weights
    names = [] if layout.axis("kv_heads") else ["k", "v", "k_bias", "v_bias", "k_norm"]
    names += ["q_norm", "k_norm"] if config.qk_norm == "head" else []
    return {
        name: jax.tree.map(lambda x: psum_grad(x, axis), weight) if name in names else weight
        for name, weight in weights.items()
    }


def local_kv_heads(x: Float[Array, "M K H"], num_own: int, axis: Axis) -> Float[Array, "M k H"]:
    """The key/value heads that a device's query heads use.

    Args:
        x: of all of the axis's devices.
        num_own: query heads of each.
        axis: over which the query heads are split.
    """
    K = x.shape[1]
    per_kv_head = num_own * axis_size(axis) // K
    first = axis_index(axis) * num_own
    if num_own % per_kv_head and per_kv_head % num_own:
        return x[:, (first + jnp.arange(num_own)) // per_kv_head]
    return lax.dynamic_slice_in_dim(x, first // per_kv_head, max(1, num_own // per_kv_head), 1)


def _mlp(
    config: ModelConfig, index: int, weights: Params, h: Float[Array, "M D"], layout: Layout
) -> tuple[Float[Array, "M D"], Routing | None]:
    if config.has_experts(index):
        assert config.experts is not None, "the layer has some"
        matrices = weights["expert_gate"], weights["expert_up"], weights["expert_down"]
        return mixture_of_experts(config.experts, h, weights["router"], *matrices, config.activation, layout)
    biases = (weights.get("gate_bias"), weights.get("up_bias"), weights.get("down_bias"))
    matrices = weights["gate"], weights["up"], weights["down"]
    return gated_mlp(h, *matrices, biases, config.activation, layout.axis("ffn")), None


def _normed(config: ModelConfig, x: Array, weight: Array | None) -> Array:
    """Normalized as the family does it, if there is a norm in this place."""
    return x if weight is None else NORMS[config.norm](x, weight, config.norm_eps)


def _added(config: ModelConfig, x: Array, norm: Array | None) -> Array:
    """What a part of a layer adds to the stream."""
    return scaled(_normed(config, x, norm), config.residual_scale)


def head_weights(params: Params) -> Weight:
    """The matrix that turns hidden states into logits: the embedding itself where they are tied."""
    return params.get("head", params["embed"])


def causal_hidden(
    config: ModelConfig, params: Params, tokens: Int[Array, "B T"], starts: Int[Array, "B"]
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm of whole, left-padded sequences; `starts` are their first columns."""
    B, T = tokens.shape

    def attend_causally(attn: AttentionConfig, cache: None, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        q, k, v = (x.reshape(B, T, *x.shape[1:]) for x in (q, k, v))
        return attend(q, k, v, starts, attn).reshape(B * T, *q.shape[2:]), cache

    positions = jnp.maximum(jnp.arange(T)[None, :] - starts[:, None], 0).reshape(-1)
    return forward(config, params, tokens.reshape(-1), positions, attend_causally).hidden.reshape(B, T, -1)


def logits(config: ModelConfig, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Next-token logits of whole sequences, float32. For small inputs: nothing is chunked."""
    hidden = causal_hidden(config, params, tokens, jnp.zeros(tokens.shape[0], jnp.int32))
    return vocabulary_logits(hidden, head_weights(params), config.logit_softcap)
