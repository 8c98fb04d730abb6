"""The table of a model's weights, from which initialization, sharding, loading and saving follow.

Every weight has one `Spec`: its shape and logical axes, its name in a Hugging Face checkpoint, and its initialization.
To add a weight to a family, add a line here, or to the part that sees images in `models.vision.specs`.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Key

from groupax.models.config import BlockKind, Experts, GatedDeltaNet, ModelConfig, ShortConvolution
from groupax.models.spec import Spec
from groupax.models.vision.specs import vision_specs
from groupax.parallel.mesh import Layout, layout_for

Params = dict[str, Any]

# Name in checkpoints; a tied model has only the embedding.
HEAD = "lm_head.weight"
# The bias that is added to the experts' scores for their choice, which is not trained, and its names in checkpoints.
ROUTER_CORRECTION, CORRECTION_NAMES = "router_correction", ("e_score_correction_bias", "expert_bias")
# Weights that are kept in float32.
FLOAT32 = (ROUTER_CORRECTION, "a_log", "dt_bias")


def embedding_name(config: ModelConfig) -> str:
    """Returns the name of the embedding in a checkpoint."""
    return f"{config.prefix}embed_tokens.weight"


def model_specs(config: ModelConfig) -> Params:
    """Returns a model's tree of `Spec`s.

    It has `embed`, `layers` (a list of dicts), `final_norm`, `head` or `score`, and `vision` if the model sees images.
    """
    D, V = config.hidden_size, config.vocab_size
    specs: Params = {
        "embed": Spec((V, D), ("vocab", "embed"), embedding_name(config)),
        "layers": [layer_specs(config, index) for index in range(config.num_layers)],
        "final_norm": _norm_spec(config, (D,), f"{config.prefix}{dict(config.module_names).get('final_norm', 'norm')}"),
    }
    if config.vision is not None:
        specs["vision"] = vision_specs(config.vision, D)
    if config.num_labels:
        specs["score"] = Spec((config.num_labels, D), (None, "embed"), "score.weight")
    elif not config.tie_embeddings:
        specs["head"] = Spec((V, D), ("vocab", "embed"), HEAD)
    return specs


# The norms of each kind of block, with their names in a checkpoint.
_BLOCK_NORMS: dict[BlockKind, dict[str, str]] = {
    "pre_norm": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post_norm": {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    "sandwich_norm": {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    "parallel": {"attention_norm": "input_layernorm"},
}


def _norm_init(config: ModelConfig) -> Literal["ones", "zeros"]:
    return "zeros" if config.norm == "zero_centered_rms" else "ones"


def layer_specs(config: ModelConfig, index: int) -> dict[str, Spec]:
    """Returns the `Spec`s of one layer."""
    prefix, D = f"{config.prefix}layers.{index}", config.hidden_size
    norms = _BLOCK_NORMS[config.block]
    specs = {ours: _norm_spec(config, (D,), f"{prefix}.{theirs}") for ours, theirs in norms.items()}
    if config.is_recurrent(index):
        specs |= _recurrent_specs(config.recurrent, D, prefix)
    else:
        specs |= _latent_specs(config, prefix) if config.latent else _attention_specs(config, prefix)
    if config.has_experts(index):
        assert config.experts is not None, "the layer has experts"
        specs |= _expert_specs(config.experts, D, prefix)
    else:
        specs |= _mlp_specs(config, prefix)
    return _renamed(specs, prefix, dict(config.module_names))


def _renamed(specs: dict[str, Spec], prefix: str, names: dict[str, str]) -> dict[str, Spec]:
    """Gives the weights and biases of some modules other names in a checkpoint."""
    renamed = dict(specs)
    for ours, theirs in names.items():
        for own, kind in ((ours, "weight"), (f"{ours}_bias", "bias")):
            if own in specs:
                renamed[own] = replace(specs[own], name=f"{prefix}.{theirs}.{kind}")
    return renamed


def _norm_spec(config: ModelConfig, shape: tuple[int, ...], name: str) -> Spec:
    return Spec(shape, (None,) * len(shape), f"{name}.weight", init=_norm_init(config))


def _attention_specs(config: ModelConfig, prefix: str) -> dict[str, Spec]:
    D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    specs: dict[str, Spec] = {}
    rows = {"q": N * H, "k": K * H, "v": K * H}
    if config.attention_gate:
        rows["q"] = 2 * N * H
    for first_row, (name, size) in zip((0, N * H, (N + K) * H), rows.items(), strict=True):
        axes = ("heads" if name == "q" else "kv_heads", "embed")
        specs[name] = Spec((size, D), axes, f"{prefix}.self_attn.{name}_proj.weight")
        if config.fused_qkv:
            fused = f"{prefix}.self_attn.qkv_proj.weight"
            specs[name] = replace(specs[name], name=fused, first_row=first_row, num_rows=(N + 2 * K) * H)
        if config.qkv_bias:
            specs[f"{name}_bias"] = Spec((size,), axes[:1], f"{prefix}.self_attn.{name}_proj.bias", init="zeros")
    specs["o"] = Spec((D, N * H), ("embed", "heads"), f"{prefix}.self_attn.o_proj.weight")
    if config.o_bias:
        specs["o_bias"] = Spec((D,), (None,), f"{prefix}.self_attn.o_proj.bias", init="zeros")
    if config.sinks:
        specs["sinks"] = Spec((N,), ("heads",), f"{prefix}.self_attn.sinks")
    if config.qk_norm not in ("none", "after_rope"):
        shapes = {"head": ((H,), (H,)), "each_head": ((N, H), (K, H)), "all_heads": ((N * H,), (K * H,))}
        q_shape, k_shape = shapes[config.qk_norm]
        specs |= {
            "q_norm": _norm_spec(config, q_shape, f"{prefix}.self_attn.q_norm"),
            "k_norm": _norm_spec(config, k_shape, f"{prefix}.self_attn.k_norm"),
        }
    if config.qk_norm == "each_head":
        for name, axis in (("q_norm", "heads"), ("k_norm", "kv_heads")):
            specs[name] = replace(specs[name], axes=(axis, None))
    return specs


def _latent_specs(config: ModelConfig, prefix: str) -> dict[str, Spec]:
    latent, D, N = config.latent, config.hidden_size, config.num_heads
    assert latent is not None, "the model has latent attention"
    name, rank = f"{prefix}.self_attn", latent.query_rank
    q_rows, kv_rows = N * (latent.plain_dims + latent.rope_dims), N * (latent.plain_dims + latent.value_dims)
    if rank is None:
        specs = {"q": Spec((q_rows, D), ("heads", "embed"), f"{name}.q_proj.weight")}
    else:
        specs = {
            "q_down": Spec((rank, D), ("compressed", "embed"), f"{name}.q_a_proj.weight"),
            "q_latent_norm": _norm_spec(config, (rank,), f"{name}.q_a_layernorm"),
            "q_up": Spec((q_rows, rank), ("heads", "latent"), f"{name}.q_b_proj.weight"),
        }
    specs |= {
        "kv_down": Spec((latent.cached_dims, D), ("compressed", "embed"), f"{name}.kv_a_proj_with_mqa.weight"),
        "kv_latent_norm": _norm_spec(config, (latent.rank,), f"{name}.kv_a_layernorm"),
        "kv_up": Spec((kv_rows, latent.rank), ("heads", "latent"), f"{name}.kv_b_proj.weight"),
        "o": Spec((D, N * latent.value_dims), ("embed", "heads"), f"{name}.o_proj.weight"),
    }
    if config.qkv_bias:
        for own in ("q_down", "kv_down") if rank else ("kv_down",):
            bias = specs[own].name.removesuffix("weight") + "bias"
            specs[f"{own}_bias"] = Spec(specs[own].shape[:1], (None,), bias, init="zeros")
    if config.o_bias:
        specs["o_bias"] = Spec((D,), (None,), f"{name}.o_proj.bias", init="zeros")
    return specs


def _recurrent_specs(recurrent: ShortConvolution | GatedDeltaNet | None, D: int, prefix: str) -> dict[str, Spec]:
    assert recurrent is not None, "the layer is recurrent"
    if isinstance(recurrent, GatedDeltaNet):
        return _delta_specs(recurrent, D, prefix)
    return _convolution_specs(recurrent, D, prefix)


def _convolution_specs(convolution: ShortConvolution, D: int, prefix: str) -> dict[str, Spec]:
    name, whole = f"{prefix}.conv", (None, None, None)
    specs = {
        "conv_in": Spec((3 * D, D), ("mixer", "embed"), f"{name}.in_proj.weight"),
        "conv": Spec((D, 1, convolution.size), whole, f"{name}.conv.weight"),
        "conv_out": Spec((D, D), ("embed", "mixer"), f"{name}.out_proj.weight"),
    }
    if convolution.has_bias:
        for own, spec in tuple(specs.items()):
            bias = spec.name.removesuffix("weight") + "bias"
            specs[f"{own}_bias"] = Spec(spec.shape[:1], (None,), bias, init="zeros")
    return specs


def _delta_specs(net: GatedDeltaNet, D: int, prefix: str) -> dict[str, Spec]:
    name, V = f"{prefix}.linear_attn", net.num_value_heads
    values = V * net.value_dims
    if net.fused:
        into = {"mixed_and_gate": ("in_proj_qkvz", net.mixed_dims + values), "step_and_decay": ("in_proj_ba", 2 * V)}
    else:
        into = {
            "mixed": ("in_proj_qkv", net.mixed_dims),
            "delta_gate": ("in_proj_z", values),
            "step": ("in_proj_b", V),
            "decay": ("in_proj_a", V),
        }
    specs = {
        own: Spec((rows, D), ("mixer", "embed"), f"{name}.{theirs}.weight") for own, (theirs, rows) in into.items()
    }
    return specs | {
        "conv": Spec((net.mixed_dims, 1, net.size), (None, None, None), f"{name}.conv1d.weight"),
        "dt_bias": Spec((V,), (None,), f"{name}.dt_bias", init="ones", is_float32=True),
        "a_log": Spec((V,), (None,), f"{name}.A_log", init="log_uniform", is_float32=True),
        "delta_norm": Spec((net.value_dims,), (None,), f"{name}.norm.weight", init="ones"),
        "delta_out": Spec((D, values), ("embed", "mixer"), f"{name}.out_proj.weight"),
    }


def _mlp_specs(config: ModelConfig, prefix: str) -> dict[str, Spec]:
    D, F = config.hidden_size, config.ffn_size
    specs = {
        "gate": Spec((F, D), ("ffn", "embed"), f"{prefix}.mlp.gate_proj.weight"),
        "up": Spec((F, D), ("ffn", "embed"), f"{prefix}.mlp.up_proj.weight"),
        "down": Spec((D, F), ("embed", "ffn"), f"{prefix}.mlp.down_proj.weight"),
    }
    if config.fused_gate_up:
        for first_row, name in ((0, "gate"), (F, "up")):
            fused = f"{prefix}.mlp.gate_up_proj.weight"
            specs[name] = replace(specs[name], name=fused, first_row=first_row, num_rows=2 * F)
    if config.mlp_bias:
        for name, size, axis in (("gate", F, "ffn"), ("up", F, "ffn"), ("down", D, None)):
            specs[f"{name}_bias"] = Spec((size,), (axis,), f"{prefix}.mlp.{name}_proj.bias", init="zeros")
    return specs


def _expert_specs(experts: Experts, D: int, prefix: str) -> dict[str, Spec]:
    E, F = experts.num, experts.ffn_size
    into, out = ("expert", "expert_ffn", "embed"), ("expert", "embed", "expert_ffn")
    specs = {
        "router": Spec((E, D), (None, "embed"), f"{prefix}.{experts.router_name}.weight"),
        "expert_gate": Spec((E, F, D), into, f"{prefix}.{experts.gate_name}.weight"),
        "expert_up": Spec((E, F, D), into, f"{prefix}.{experts.up_name}.weight"),
        "expert_down": Spec((E, D, F), out, f"{prefix}.{experts.down_name}.weight"),
    }
    if experts.fused is not None:
        specs |= _fused_expert_specs(experts, specs, prefix)
    if experts.has_bias:
        specs |= _expert_bias_specs(experts, specs, prefix)
    if experts.has_correction:
        name = f"{prefix}.{experts.correction_name}"
        specs[ROUTER_CORRECTION] = Spec((E,), (None,), name, init="zeros", is_float32=True)
    if F := experts.shared_ffn_size:
        name = f"{prefix}.{experts.shared_name}"
        specs |= {
            "shared_gate": Spec((F, D), ("shared_ffn", "embed"), f"{name}.gate_proj.weight"),
            "shared_up": Spec((F, D), ("shared_ffn", "embed"), f"{name}.up_proj.weight"),
            "shared_down": Spec((D, F), ("embed", "shared_ffn"), f"{name}.down_proj.weight"),
        }
        if experts.has_shared_gate:
            specs["shared_logit"] = Spec((1, D), ("mixer", "embed"), f"{name}_gate.weight")
    return specs


def _fused_expert_specs(experts: Experts, specs: dict[str, Spec], prefix: str) -> dict[str, Spec]:
    """Returns the specs of experts whose tensors are transposed, with gate and up in one of them."""
    rows = _fused_rows(experts)

    def fused(own: str, name: str, **others: Any) -> Spec:
        spec = replace(specs[own], name=f"{prefix}.{name}", **others)
        _, out_size, in_size = spec.fused_shape
        return replace(spec, is_transposed=not (experts.squares_are_kept and out_size == in_size))

    return {
        "expert_gate": fused("expert_gate", experts.gate_name, row_dim=1, **rows["expert_gate"]),
        "expert_up": fused("expert_up", experts.up_name, row_dim=1, **rows["expert_up"]),
        "expert_down": fused("expert_down", experts.down_name),
    }


def _expert_bias_specs(experts: Experts, specs: dict[str, Spec], prefix: str) -> dict[str, Spec]:
    """Returns the biases of a router and of experts in fused tensors."""
    E, rows = experts.num, _fused_rows(experts)
    router = Spec((E,), (None,), f"{prefix}.{experts.router_name}.bias", init="zeros")
    biases = {"router_bias": router}
    for own in ("expert_gate", "expert_up", "expert_down"):
        spec = specs[own]
        axes = ("expert", "expert_ffn" if own in rows else None)
        bias = Spec(spec.shape[:2], axes, f"{spec.name}_bias", init="zeros", row_dim=1, **rows.get(own, {}))
        biases[f"{own}_bias"] = bias
    return biases


def _fused_rows(experts: Experts) -> dict[str, dict[str, Any]]:
    """Returns the rows of gate and up in a fused tensor, as arguments of `Spec`."""
    F = experts.ffn_size
    first, step = (1, 2) if experts.fused == "alternating" else (F, 1)
    own = {"num_rows": 2 * F, "row_step": step}
    return {"expert_gate": {"first_row": 0, **own}, "expert_up": {"first_row": first, **own}}


def spec_leaves(config: ModelConfig) -> Iterator[Spec]:
    """Iterates over the specs in the order in which jax flattens the parameters."""
    return iter(jax.tree.leaves(model_specs(config)))


def num_params(config: ModelConfig) -> int:
    """Counts the parameters of a model."""
    return sum(math.prod(spec.shape) for spec in spec_leaves(config))


def split_dims(config: ModelConfig) -> dict[str, int]:
    """Returns the dims that a mesh may shard, by their names in `parallel.mesh.RULES`, in indivisible units."""
    by_head = config.qk_norm != "all_heads"  # otherwise a norm's statistic spans all heads
    sizes = {
        "embed": config.hidden_size,
        "vocab": config.vocab_size,
        "heads": config.num_heads if by_head else 1,
    }
    if config.latent is None:
        sizes["kv_heads"] = config.num_kv_heads if by_head else 1
    else:
        sizes["latent"] = math.gcd(config.latent.rank, config.latent.query_rank or 0)
    if not all(map(config.has_experts, range(config.num_layers))):
        sizes["ffn"] = config.ffn_size
    if config.experts is not None:
        sizes |= {"expert_ffn": config.experts.ffn_size, "expert": config.experts.num}
        if config.experts.shared_ffn_size:
            sizes["shared_ffn"] = config.experts.shared_ffn_size
    return sizes


def layout_of(config: ModelConfig, mesh: Mesh) -> Layout:
    """Returns the layout of the model on a mesh."""
    return layout_for(split_dims(config), mesh)


def param_shardings(config: ModelConfig, mesh: Mesh) -> Any:
    """Returns the sharding of each weight on `mesh`, in the structure of the parameters."""
    layout = layout_of(config, mesh)
    return jax.tree.map(lambda spec: NamedSharding(mesh, layout.spec(spec.axes)), model_specs(config))


def init_params(config: ModelConfig, key: Key[Array, ""], mesh: Mesh, dtype: Any = jnp.float32) -> Params:
    """Initializes random weights on `mesh`; a weight's values depend only on the key and its name in a checkpoint."""
    return _initializer(config, mesh, jnp.dtype(dtype))(key)


@lru_cache(maxsize=16)
def _initializer(config: ModelConfig, mesh: Mesh, dtype: Any) -> Callable[[Key[Array, ""]], Params]:
    """Returns a jitted function that initializes weights with a key."""
    specs = model_specs(config)

    def init(spec: Spec, key: Array) -> Array:
        own = jnp.float32 if spec.is_float32 else dtype
        if spec.init in ("ones", "zeros"):
            return jnp.full(spec.shape, float(spec.init == "ones"), own)
        label = spec.name if spec.num_rows is None else f"{spec.name}[{spec.first_row}]"
        weight_key = jax.random.fold_in(key, zlib.crc32(label.encode()))
        if spec.init == "log_uniform":
            return jnp.log(jax.random.uniform(weight_key, spec.shape, minval=0.01, maxval=16.0)).astype(own)
        return (0.02 * jax.random.normal(weight_key, spec.shape, jnp.float32)).astype(dtype)

    def init_weights(key: Array) -> Params:
        return jax.tree.map(lambda spec: init(spec, key), specs)

    return jax.jit(init_weights, out_shardings=param_shardings(config, mesh))


def weight_dtype(path: tuple[Any, ...], dtype: Any) -> Any:
    """Returns the dtype of the weight at a path of the tree when the weights are cast to a dtype."""
    return jnp.float32 if getattr(path[-1], "key", None) in FLOAT32 else dtype
