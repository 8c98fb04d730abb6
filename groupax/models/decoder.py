"""The decoder: one forward pass for training, scoring, prefill and decoding.

The pass works on a flat list of M tokens with their positions. Its uses differ only in which tokens see which, and that
is up to the caller: its `attend` receives a layer's queries, keys and values of all M tokens and returns the attention
output of each token, and the layer's updated cache if there is one. Layers with a recurrent state call its `recur`
instead, which takes a layer's recurrence through the tokens of each sequence.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from groupax.models.attention import attend, local_kv_heads
from groupax.models.config import AttentionConfig, ModelConfig, Rope
from groupax.models.execution import DIRECT, Execution, apply_layers
from groupax.models.experts import Router, Routing, mixture_of_experts
from groupax.models.latent_attention import latent_attention
from groupax.models.layers import (
    linear,
    lookup,
    mlp,
    norm,
    plus_bias,
    row_parallel_linear,
    scaled,
    vocabulary_logits,
)
from groupax.models.params import gather_weight, gather_weights
from groupax.models.recurrent import Recurrence, empty_state, recurrent_layer
from groupax.models.rope import Tables, apply_rope, query_factors, rope_tables
from groupax.models.specs import ROUTER_CORRECTION, Params, layer_specs
from groupax.parallel.collectives import Axis, axis_index, axis_size, psum, psum_grad
from groupax.parallel.mesh import GATHERED, REPLICATED, Layout
from groupax.parallel.pytree import pytree

# (attention settings, the layer's cache or None, queries [M, N, H], keys [M, K, H], values [M, K, H], sinks [N] if the
# model has them) -> (outputs [M, N, H], the layer's updated cache)
Attend = Callable[..., tuple[Array, Any]]
# (a layer's recurrence, the layer's cache or None, its inputs of all M tokens) -> (outputs [M, ...], the updated cache)
Recur = Callable[[Recurrence, Any, Any], tuple[Array, Any]]
# The primitives of attention kernels: Pallas's and cuDNN's.
KERNELS = ("pallas_call", "dot_product_attention_fwd_wrapper")


class ForwardOutput(NamedTuple):
    """The result of a forward pass.

    Attributes:
        hidden: Hidden states after the final norm, times `hidden_scale`, in the dtype of the parameters.
        caches: Cache that `attend` or `recur` returned for each layer.
        routings: Routing of the tokens in each layer with experts.
    """

    hidden: Float[Array, "M D"]
    caches: list[Any]
    routings: list[Routing]


@pytree
class ImageInputs:
    """Features of images that take the place of tokens.

    Attributes:
        features: Features of each level (`vision.tower.encode_images`). Those of level 0 replace the embeddings of
            their tokens, and those of level l > 0 are added to the hidden states after layer l - 1.
        feature_index: Index of each token's feature; -1 for text.
    """

    features: Float[Any, "levels F D"]
    feature_index: Int[Any, "M"]


class PassOptions(NamedTuple):
    """The further inputs and settings of a forward pass.

    Attributes:
        execution: Execution settings; layers with caches are not scanned.
        layout: Sharding of the model, inside a shard_map. Each device has its shard of the weights, and `attend`
            receives its heads; hidden states and recurrent layers are replicated.
        images: Features in place of tokens, which are replicated like hidden states; None if all tokens are text.
        recorded: Experts that each token chooses in each layer with experts, layer by layer; -1 where its router does.
            None leaves all choices to the routers.
        recur: Recurrence of the caller (see above); None for models without recurrent layers.
    """

    execution: Execution = DIRECT
    layout: Layout = REPLICATED
    images: ImageInputs | None = None
    recorded: Int[Array, "M LA"] | None = None
    recur: Recur | None = None


def _dots_and_kernels(primitive: Any, *args: Any, **params: Any) -> bool:
    """Saves the results of matmuls and of kernels."""
    return primitive.name in KERNELS or jax.checkpoint_policies.dots_saveable(primitive, *args, **params)


# Values of a layer that are saved for the backward pass: its input alone, also the matmuls with weights, or also those
# of activations with each other (attention's). The rest is recomputed.
_SAVED = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "all_dots": _dots_and_kernels,
}


def _all_except_gathered(primitive: Any, *_args: Any, **_params: Any) -> bool:
    """Saves everything for the backward pass except weights that were gathered from other devices."""
    return primitive.name != "all_gather"


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "M"],
    positions: Int[Array, "... M"],
    attend: Attend,
    caches: Sequence[Any] | None = None,
    options: PassOptions = PassOptions(),  # noqa: B008 - it cannot be changed
) -> ForwardOutput:
    """Runs the decoder on a flat list of tokens.

    Layers of the same kind are traced once, so `attend` and `recur` may read their closures but must not change them.

    Args:
        tokens: Token ids.
        positions: Position of each token in its sequence, or three coordinates of it (see `Rope.sections`).
        attend: Attention of the caller (see above). Whether the tokens of an image see each other is up to it too (see
            `attention.same_image`).
        caches: Cache of each layer, passed to `attend` or `recur`; None for no caches.
        options: Further inputs and settings.
    """
    execution, layout, images, recorded, recur = options
    x = _embed(params, tokens, execution, layout)
    if config.embedding_scale != 1.0:  # rounded to the parameters' dtype, as in transformers
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if config.num_learned_positions:
        x = x + lookup(gather_weight(layout, (None, "embed"), params["positions"], execution.reduce_dtype), positions)
    if images is not None:
        x = jnp.where(images.feature_index[:, None] < 0, x, _features(images, 0, x.dtype))
    at = _At.positions(config, positions, x.dtype)

    def layer(x: Array, given: tuple[Params, Array | None], cache: Any, index: int) -> tuple[Array, Any, Any]:
        weights, chosen = given
        weights = gather_weights(layout, layer_specs(config, index), weights, execution.reduce_dtype)
        h = _norm(config, x, weights, "attention_norm")
        bound, is_cached = partial(attend, config.attention(index), cache), cache is not None
        if config.is_recurrent(index):
            assert recur is not None, "callers pass it for models with recurrent layers"
            through, before = recur, cache
            attended, cache = recurrent_layer(config, weights, h, lambda step, inputs: through(step, before, inputs))
        elif config.latent is None:
            attended, cache = _attention(config, index, weights, h, at, bound, layout)
        else:
            rotate = partial(_rotated, config.ropes[index], at)
            attended, cache = latent_attention(
                config.latent, weights, h, rotate, bound, is_cached, layout.axis("heads")
            )
        block_input, x = x, x + _residual(config, attended, weights, "attention_out_norm")
        if config.block != "parallel":
            h = _norm(config, block_input if config.block == "parallel_norms" else x, weights, "mlp_norm")
        out, routing = _mlp(config, index, weights, h, layout, chosen)
        return x + _residual(config, out, weights, "mlp_out_norm"), cache, routing

    compiled = _with_checkpointing(layer, execution, layout)
    scans = execution.scan_layers and caches is None
    caches = list(caches) if caches is not None else [None] * config.num_layers

    def apply_layer(x: Array, given: tuple[Params, Array | None], index: int) -> tuple[Array, Routing | None]:
        x, caches[index], routing = compiled(x, given, caches[index], config.first_similar_layer(index))
        if images is not None and index < num_later:
            x = x + jnp.where(images.feature_index[:, None] < 0, 0, _features(images, index + 1, x.dtype))
        return x, routing

    num_later = 0 if images is None else images.features.shape[0] - 1
    kinds: list[Any] = [config.first_similar_layer(index) if scans else index for index in range(config.num_layers)]
    kinds[:num_later] = [("features", index) for index in range(num_later)]  # which no scan may repeat
    layers = list(zip(params["layers"], _choices(config, recorded), strict=True))
    x, routings = apply_layers(apply_layer, x, layers, kinds)
    hidden = scaled(_norm(config, x, params, "final_norm"), config.hidden_scale)
    return ForwardOutput(hidden, caches, [routing for routing in routings if routing is not None])


def _choices(config: ModelConfig, recorded: Int[Array, "M LA"] | None) -> list[Array | None]:
    """Returns the recorded experts of each layer, [M, A]."""
    choices: list[Array | None] = [None] * config.num_layers
    if recorded is not None:
        assert config.experts is not None, "recorded of a model with experts"
        each = jnp.split(recorded, len(config.experts.layers), axis=1)
        for layer, own in zip(sorted(config.experts.layers), each, strict=True):
            choices[layer] = own
    return choices


def _features(images: ImageInputs, level: int, dtype: Any) -> Float[Array, "M D"]:
    """Returns the feature of each token; that of a token of text has no meaning."""
    return lookup(images.features[level].astype(dtype), jnp.maximum(images.feature_index, 0))


class _At(NamedTuple):
    """The functions of M tokens' positions that all layers share.

    Attributes:
        ropes: Cosines and sines of each rotary embedding.
        query_factors: Factors of the queries; None if all are 1.
    """

    ropes: dict[Rope, Tables]
    query_factors: Float[Array, "M 1 1"] | None

    @classmethod
    def positions(cls, config: ModelConfig, positions: Int[Array, "... M"], dtype: Any) -> "_At":
        ropes = {rope: rope_tables(rope, config.max_positions, positions, dtype) for rope in config.ropes if rope}
        if config.query_growth is None:
            return cls(ropes, None)
        return cls(ropes, query_factors(config.query_growth, positions)[:, None, None].astype(dtype))


def _with_checkpointing(layer: Callable[..., Any], execution: Execution, layout: Layout) -> Callable[..., Any]:
    """Wraps a layer so that the backward pass recomputes what it should; argument 3, the index, is static."""
    if execution.checkpointing != "none":
        layer = jax.checkpoint(layer, static_argnums=3, policy=_SAVED[execution.checkpointing])
    elif any(layout.axis(dim) is not None for dim in GATHERED):
        layer = jax.checkpoint(layer, static_argnums=3, policy=_all_except_gathered)
    return jax.jit(layer, static_argnums=3)


def _embed(params: Params, tokens: Int[Array, "M"], execution: Execution, layout: Layout) -> Float[Array, "M D"]:
    """Looks up the embeddings. With a sharded vocabulary each device contributes its own rows to a psum."""
    table = gather_weight(layout, ("vocab", "embed"), params["embed"], execution.reduce_dtype)
    axis = layout.axis("vocab")
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
    at: _At,
    attend: Callable[..., tuple[Array, Any]],
    layout: Layout,
) -> tuple[Float[Array, "M D"], Any]:
    M, axis = h.shape[0], layout.axis("heads")
    h, weights = psum_grad(h, axis), _with_psum_grads(config, weights, layout)
    q, k, v = _queries_keys_values(config, weights, h, axis)
    if config.qk_norm == "all_heads":
        q, k = _norm(config, q, weights, "q_norm"), _norm(config, k, weights, "k_norm")
    gate = None
    if config.attention_gate:
        q, gate = jnp.split(q.reshape(M, -1, 2 * config.head_dim), 2, axis=-1)
    q, k, v = (x.reshape(M, -1, config.head_dim) for x in (q, k, v))
    if config.qk_norm in ("head", "each_head"):
        q, k = _norm(config, q, weights, "q_norm"), _norm(config, k, weights, "k_norm")
    rope, growth, factors = config.ropes[index], config.query_growth, at.query_factors
    q, k = (_rotated(rope, at, x) for x in (q, k))
    if config.qk_norm == "head_after_rope":
        q, k = _norm(config, q, weights, "q_norm"), _norm(config, k, weights, "k_norm")
    elif config.qk_norm == "after_rope" and rope is not None:
        unit = jnp.ones(config.head_dim, q.dtype)
        q, k = (norm(x, unit, config.norm_eps, config.norm) for x in (q, k))
    if growth is not None and factors is not None and (rope is None or not growth.only_without_rope):
        q = q * factors
    if axis is not None and layout.axis("kv_heads") is None and config.joint_qkv is None:
        k, v = (local_kv_heads(x, q.shape[1], axis) for x in (k, v))
    out, cache = attend(q, k, v, *([weights["sinks"]] if config.sinks else []))
    out = out if gate is None else out * jax.nn.sigmoid(gate)
    return row_parallel_linear(out.reshape(M, -1), weights["o"], weights.get("o_bias"), axis), cache


def _queries_keys_values(
    config: ModelConfig, weights: Params, h: Float[Array, "M D"], axis: Axis
) -> tuple[Float[Array, "M O"], ...]:
    """Computes the queries, keys and values of a device's heads."""
    if config.joint_qkv is None:
        return tuple(linear(h, weights[name], weights.get(f"{name}_bias")) for name in ("q", "k", "v"))
    qkv, M, N, H = linear(h, weights["qkv"], weights.get("qkv_bias")), len(h), config.num_heads, config.head_dim
    if config.joint_qkv == "by_head":
        return tuple(x.reshape(M, -1) for x in jnp.split(qkv.reshape(M, -1, 3 * H), 3, axis=-1))
    heads = (x.reshape(M, N, H) for x in jnp.split(qkv, 3, axis=-1))
    num_own = N if axis is None else N // axis_size(axis)
    return tuple((x if axis is None else local_kv_heads(x, num_own, axis)).reshape(M, -1) for x in heads)


def _rotated(rope: Rope | None, at: _At, x: Float[Array, "M n H"]) -> Float[Array, "M n H"]:
    return x if rope is None else apply_rope(x, at.ropes[rope], rope.interleaved)


def _with_psum_grads(config: ModelConfig, weights: Params, layout: Layout) -> Params:
    """Marks the replicated weights that each device applies to its own heads, so that their gradients are summed."""
    axis = layout.axis("heads")
    if axis is None:
        return weights
    names = [] if layout.axis("kv_heads") else ["k", "v", "k_bias", "v_bias", "k_norm"]
    names += ["qkv", "qkv_bias"] if config.joint_qkv == "by_kind" else []
    names += ["q_norm", "k_norm"] if config.qk_norm in ("head", "head_after_rope") else []
    return {
        name: jax.tree.map(lambda x: psum_grad(x, axis), weight) if name in names else weight
        for name, weight in weights.items()
    }


def _mlp(
    config: ModelConfig,
    index: int,
    weights: Params,
    h: Float[Array, "M D"],
    layout: Layout,
    recorded: Int[Array, "M A"] | None,
) -> tuple[Float[Array, "M D"], Routing | None]:
    if config.has_experts(index):
        assert config.experts is not None, "the layer has some"
        matrices = weights["expert_gate"], weights["expert_up"], weights["expert_down"]
        router = Router(weights["router"], weights.get("router_bias"), weights.get(ROUTER_CORRECTION))
        biases = weights.get("expert_gate_bias"), weights.get("expert_up_bias"), weights.get("expert_down_bias")
        out, routing = mixture_of_experts(
            config.experts, h, router, matrices, biases, config.activation, layout, recorded
        )
        if config.experts.shared_ffn_size:
            shared = weights["shared_gate"], weights["shared_up"], weights["shared_down"]
            extra = mlp(h, *shared, (None, None, None), config.activation, layout.axis("shared_ffn"))
            if config.experts.has_shared_gate:
                extra = jax.nn.sigmoid(linear(h, weights["shared_logit"])) * extra
            out = out + extra
        return out, routing
    biases = (weights.get("gate_bias"), weights.get("up_bias"), weights.get("down_bias"))
    matrices = weights.get("gate"), weights["up"], weights["down"]
    return mlp(h, *matrices, biases, config.activation, layout.axis("ffn")), None


def _norm(config: ModelConfig, x: Array, weights: Params, name: str) -> Array:
    """Applies the family's norm with the weights of a name; without these there is no norm."""
    if name not in weights:
        return x
    return plus_bias(norm(x, weights[name], config.norm_eps, config.norm), weights.get(f"{name}_bias"))


def _residual(config: ModelConfig, x: Array, weights: Params, name: str) -> Array:
    """Returns what a block adds to the residual stream."""
    return scaled(_norm(config, x, weights, name), config.residual_scale)


def head_weights(params: Params) -> Array:
    """Returns the matrix that turns hidden states into logits: the embedding itself if they are tied."""
    return params.get("head", params["embed"])


def causal_hidden(
    config: ModelConfig, params: Params, tokens: Int[Array, "B T"], starts: Int[Array, "B"]
) -> Float[Array, "B T D"]:
    """Computes the hidden states of left-padded sequences after the final norm; `starts` are their first columns."""
    B, T = tokens.shape

    def attend_causally(
        attn: AttentionConfig, cache: None, q: Array, k: Array, v: Array, sinks: Array | None = None
    ) -> tuple[Array, None]:
        q, k, v = (x.reshape(B, T, *x.shape[1:]) for x in (q, k, v))
        return attend(q, k, v, starts, attn, sinks=sinks).reshape(B * T, *q.shape[2:]), cache

    def recur_causally(recurrence: Recurrence, cache: None, inputs: Any) -> tuple[Array, None]:
        columns = jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), inputs)
        out, _ = recurrence.scan(empty_state(config, B), columns, jnp.arange(T)[None, :] >= starts[:, None])
        return out.reshape(B * T, *out.shape[2:]), cache

    positions = jnp.maximum(jnp.arange(T)[None, :] - starts[:, None], 0).reshape(-1)
    found = forward(
        config, params, tokens.reshape(-1), positions, attend_causally, options=PassOptions(recur=recur_causally)
    )
    return found.hidden.reshape(B, T, -1)


def logits(config: ModelConfig, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Computes the next-token logits of sequences in float32. Meant for small inputs: nothing is chunked."""
    hidden = causal_hidden(config, params, tokens, jnp.zeros(tokens.shape[0], jnp.int32))
    return vocabulary_logits(hidden, head_weights(params), config.logit_softcap)
