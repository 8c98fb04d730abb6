"""The table of a model's weights, from which initialization, sharding, loading and saving follow.

Every weight is one `Spec`: its shape and logical axes, the tensor's name in a Hugging Face checkpoint, and how it
is initialized. Adding a weight to a family means adding a line here.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Key

from groupax.models.config import ModelConfig
from groupax.parallel.mesh import sharding_for

Params = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """One weight.

    Attributes:
        shape: as in the checkpoint; matrices are [out, in], the embedding and the head [V, D].
        axes: a logical axis name (or None) per dim; `parallel.mesh.RULES` maps them to mesh axes.
        name: the tensor's name in a Hugging Face checkpoint.
        init: "normal" draws from N(0, 0.02^2); "ones" and "zeros" say what they are.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    name: str
    init: Literal["normal", "ones", "zeros"] = "normal"


def model_specs(config: ModelConfig) -> Params:
    """The tree of `Spec`s of a model: `embed`, `layers` (a list of dicts), `final_norm`, and `head` or `score`."""
    D, V = config.hidden_size, config.vocab_size
    specs: Params = {
        "embed": Spec((V, D), ("vocab", "embed"), "model.embed_tokens.weight"),
        "layers": [_layer_specs(config, f"model.layers.{index}") for index in range(config.num_layers)],
        "final_norm": Spec((D,), (None,), "model.norm.weight", init="ones"),
    }
    if config.num_labels:
        specs["score"] = Spec((config.num_labels, D), (None, "embed"), "score.weight")
    elif not config.tie_embeddings:
        specs["head"] = Spec((V, D), ("vocab", "embed"), "lm_head.weight")
    return specs


def _layer_specs(config: ModelConfig, prefix: str) -> dict[str, Spec]:
    D, F, H = config.hidden_size, config.ffn_size, config.head_dim
    NH, KH = config.num_heads * H, config.num_kv_heads * H

    def linear(fan_in: int, fan_out: int, axes: tuple[str, str], name: str) -> Spec:
        return Spec((fan_out, fan_in), axes, f"{prefix}.{name}.weight")

    def bias(size: int, axis: str | None, name: str) -> Spec:
        return Spec((size,), (axis,), f"{prefix}.{name}.bias", init="zeros")

    def norm(size: int, name: str) -> Spec:
        return Spec((size,), (None,), f"{prefix}.{name}.weight", init="ones")

    specs = {
        "attention_norm": norm(D, "input_layernorm"),
        "q": linear(D, NH, ("heads", "embed"), "self_attn.q_proj"),
        "k": linear(D, KH, ("kv_heads", "embed"), "self_attn.k_proj"),
        "v": linear(D, KH, ("kv_heads", "embed"), "self_attn.v_proj"),
        "o": linear(NH, D, ("embed", "heads"), "self_attn.o_proj"),
        "mlp_norm": norm(D, "post_attention_layernorm"),
        "gate": linear(D, F, ("ffn", "embed"), "mlp.gate_proj"),
        "up": linear(D, F, ("ffn", "embed"), "mlp.up_proj"),
        "down": linear(F, D, ("embed", "ffn"), "mlp.down_proj"),
    }
    if config.qkv_bias:
        specs["q_bias"] = bias(NH, "heads", "self_attn.q_proj")
        specs["k_bias"] = bias(KH, "kv_heads", "self_attn.k_proj")
        specs["v_bias"] = bias(KH, "kv_heads", "self_attn.v_proj")
    if config.o_bias:
        specs["o_bias"] = bias(D, None, "self_attn.o_proj")
    if config.qk_norm:
        specs["q_norm"] = norm(H, "self_attn.q_norm")
        specs["k_norm"] = norm(H, "self_attn.k_norm")
    if config.mlp_bias:
        specs["gate_bias"] = bias(F, "ffn", "mlp.gate_proj")
        specs["up_bias"] = bias(F, "ffn", "mlp.up_proj")
        specs["down_bias"] = bias(D, None, "mlp.down_proj")
    return specs


def spec_leaves(config: ModelConfig) -> Iterator[Spec]:
    """The specs in the order in which jax flattens the parameters."""
    return iter(jax.tree.leaves(model_specs(config)))


def num_params(config: ModelConfig) -> int:
    """How many numbers the model holds."""
    return sum(math.prod(spec.shape) for spec in spec_leaves(config))


def param_shardings(config: ModelConfig, mesh: Mesh) -> Any:
    """The sharding of each weight on `mesh`, in the structure of the parameters."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, sharding_for(spec.axes, spec.shape, mesh)), model_specs(config)
    )


def init_params(config: ModelConfig, key: Key[Array, ""], mesh: Mesh, dtype: Any = jnp.float32) -> Params:
    """Random weights, placed on `mesh`; a weight's values depend on the key and its name only."""

    def init(spec: Spec) -> Array:
        if spec.init != "normal":
            return jnp.full(spec.shape, float(spec.init == "ones"), dtype)
        own_key = jax.random.fold_in(key, zlib.crc32(spec.name.encode()))
        return (0.02 * jax.random.normal(own_key, spec.shape, jnp.float32)).astype(dtype)

    specs = model_specs(config)
    return jax.jit(lambda: jax.tree.map(init, specs), out_shardings=param_shardings(config, mesh))()
