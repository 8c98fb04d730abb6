"""The decoder: one forward pass for training, scoring, prefill and decoding.

The pass works on a flat list of M tokens with their positions. What differs between its uses is only which
tokens see which, and that is the caller's `attend`: it gets a layer's queries, keys and values of all M
tokens and returns what each token attended to.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from groupax.config import Checkpointing
from groupax.models.attention import attend
from groupax.models.config import ModelConfig
from groupax.models.layers import Weight, linear, rms_norm, rope_tables, rotate, swiglu, vocabulary_logits
from groupax.models.specs import Params

# (layer, queries [M, N, H], keys [M, K, H], values [M, K, H]) -> [M, N, H]
Attend = Callable[[int, Array, Array, Array], Array]
# What the backward pass finds of a layer: its input alone, its input and the products with weights, or those with each
# other (attention's) too. The rest is computed again.
_SAVED = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "all_dots": jax.checkpoint_policies.dots_saveable,
}


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "M"],
    positions: Int[Array, "M"],
    attend: Attend,
    checkpointing: Checkpointing = "none",
) -> Float[Array, "M D"]:
    """Hidden states after the final norm, in the dtype of the parameters."""
    x = params["embed"][tokens]
    rope = rope_tables(config, positions, x.dtype)

    def layer(x: Array, weights: Params, index: int) -> Array:
        x = x + _attention(config, weights, x, rope, lambda q, k, v: attend(index, q, k, v))
        h = rms_norm(x, weights["mlp_norm"], config.norm_eps)
        biases = (weights.get("gate_bias"), weights.get("up_bias"), weights.get("down_bias"))
        return x + swiglu(h, weights["gate"], weights["up"], weights["down"], biases)

    if checkpointing != "none":
        layer = jax.checkpoint(layer, static_argnums=2, policy=_SAVED[checkpointing])
    for index, weights in enumerate(params["layers"]):
        x = layer(x, weights, index)
    return rms_norm(x, params["final_norm"], config.norm_eps)


def _attention(
    config: ModelConfig,
    weights: Params,
    x: Float[Array, "M D"],
    rope: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], Array],
) -> Float[Array, "M D"]:
    M = x.shape[0]
    h = rms_norm(x, weights["attention_norm"], config.norm_eps)
    q = linear(h, weights["q"], weights.get("q_bias")).reshape(M, config.num_heads, config.head_dim)
    k = linear(h, weights["k"], weights.get("k_bias")).reshape(M, config.num_kv_heads, config.head_dim)
    v = linear(h, weights["v"], weights.get("v_bias")).reshape(M, config.num_kv_heads, config.head_dim)
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"], config.norm_eps)
        k = rms_norm(k, weights["k_norm"], config.norm_eps)
    # `attend` divides by the root of the dims that it gets
    q = rotate(q, rope) * jnp.asarray((config.attention_dim / config.head_dim) ** 0.5, q.dtype)
    unused = ((0, 0), (0, 0), (0, config.attention_dim - config.head_dim))
    out = attend(*(jnp.pad(x, unused) for x in (q, rotate(k, rope), v)))[..., : config.head_dim]
    return linear(out.reshape(M, -1), weights["o"], weights.get("o_bias"))


def head_weights(params: Params) -> Weight:
    """The matrix that turns hidden states into logits: the embedding itself where they are tied."""
    return params.get("head", params["embed"])


def causal_hidden(
    config: ModelConfig, params: Params, tokens: Int[Array, "B T"], starts: Int[Array, "B"]
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm of whole, left-padded sequences; `starts` are their first columns."""
    B, T = tokens.shape

    def attend_causally(_: int, q: Array, k: Array, v: Array) -> Array:
        q, k, v = (x.reshape(B, T, *x.shape[1:]) for x in (q, k, v))
        return attend(q, k, v, starts).reshape(B * T, *q.shape[2:])

    positions = jnp.maximum(jnp.arange(T)[None, :] - starts[:, None], 0).reshape(-1)
    return forward(config, params, tokens.reshape(-1), positions, attend_causally).reshape(B, T, -1)


def logits(config: ModelConfig, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Next-token logits of whole sequences, float32. For small inputs: nothing is chunked."""
    hidden = causal_hidden(config, params, tokens, jnp.zeros(tokens.shape[0], jnp.int32))
    return vocabulary_logits(hidden, head_weights(params))
