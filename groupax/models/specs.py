"""The table of a model's weights, from which initialization, sharding, loading and saving follow.

Every weight has one `Spec`: its shape and logical axes, its name in a Hugging Face checkpoint, and its initialization.
To add a weight to a family, add a line here. Those of the part that sees images are at the end.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from groupax.models.config import BlockKind, Experts, GatedDeltaNet, ModelConfig, ShortConvolution
from groupax.models.vision.config import AveragePool, PatchMerger, PixelShuffle, TowerConfig, VisionConfig


@dataclass(frozen=True)
class Spec:
    """One weight.

    Attributes:
        shape: Shape as in the checkpoint; matrices are [out, in], the embedding and the head [V, D].
        axes: Logical axis name (or None) of each dim; `parallel.mesh.RULES` maps them to mesh axes.
        name: Name of the tensor in a Hugging Face checkpoint; with `{expert}` one tensor for each index of the first
            dim.
        init: Initialization; "normal" draws from N(0, 0.02^2), "log_uniform" takes logarithms of draws from [0.01, 16).
        first_row: First row of the weight in a tensor that is fused with other weights.
        num_rows: Number of rows of that fused tensor; None if the tensor is the weight.
        row_dim: Dim of its rows.
        row_step: Distance of its rows in the fused tensor.
        is_transposed: Whether the tensor has the last two dims in the other order.
        is_float32: Whether it is kept in float32 whatever the dtype of the other weights.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    name: str
    init: Literal["normal", "ones", "zeros", "log_uniform"] = "normal"
    first_row: int = 0
    num_rows: int | None = None
    row_dim: int = 0
    row_step: int = 1
    is_transposed: bool = False
    is_float32: bool = False

    @property
    def is_matrix(self) -> bool:
        """True if it is a matrix that multiplies all tokens."""
        return len(self.shape) == 2 and None not in self.axes and "expert" not in self.axes

    @property
    def is_vision_matrix(self) -> bool:
        """True if it is a matrix that multiplies all patches or features of an image, which may be adapted."""
        return self.is_matrix and "vision" in self.axes

    @property
    def is_layer_matrix(self) -> bool:
        """True if it is such a matrix of a layer of the decoder, which may be quantized and adapted."""
        return self.is_matrix and ".layers." in self.name and not self.is_vision_matrix

    @property
    def is_stacked(self) -> bool:
        """True if each index of the first dim is a separate tensor in the checkpoint."""
        return "{expert}" in self.name

    @property
    def tensor_names(self) -> list[str]:
        """The names of the checkpoint's tensors that hold the weight."""
        return [self.name.format(expert=index) for index in range(self.shape[0])] if self.is_stacked else [self.name]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of these tensors."""
        return _swapped(self.fused_shape[1:] if self.is_stacked else self.fused_shape, self.is_transposed)

    @property
    def fused_shape(self) -> tuple[int, ...]:
        """The shape of the weight with all others in its tensor, in the weight's order of dims."""
        if self.num_rows is None:
            return self.shape
        return (*self.shape[: self.row_dim], self.num_rows, *self.shape[self.row_dim + 1 :])

    def fused_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns the index in a fused tensor, whose dims are in the weight's order, of a part of the weight."""
        if self.num_rows is None:
            return index
        first, end, _ = index[self.row_dim].indices(self.shape[self.row_dim])
        start = self.first_row + first * self.row_step
        rows = slice(start, start + (end - first - 1) * self.row_step + 1, self.row_step)
        return (*index[: self.row_dim], rows, *index[self.row_dim + 1 :])

    def stored_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns the index in the checkpoint's tensor of a part of the weight."""
        return _swapped(self.fused_index(index), self.is_transposed)

    def reordered(self, array: Any) -> Any:
        """Returns a tensor of the checkpoint with the weight's order of dims, or the reverse."""
        return array.swapaxes(-1, -2) if self.is_transposed else array


def _swapped(dims: tuple[Any, ...], is_transposed: bool) -> tuple[Any, ...]:
    """Returns what there is for each dim, with that of the last two swapped if the tensor is transposed."""
    return (*dims[:-2], dims[-1], dims[-2]) if is_transposed else dims


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


def layer_specs(config: ModelConfig, index: int) -> dict[str, Spec]:
    """Returns the `Spec`s of one layer."""
    prefix, D = f"{config.prefix}layers.{index}", config.hidden_size
    norms = _BLOCK_NORMS[config.block]
    specs = {ours: _norm_spec(config, (D,), f"{prefix}.{theirs}") for ours, theirs in norms.items()}
    if config.is_recurrent(index):
        net = config.recurrent
        assert net is not None, "the layer is recurrent"
        is_delta = isinstance(net, GatedDeltaNet)
        specs |= _delta_specs(net, D, prefix) if is_delta else _convolution_specs(net, D, prefix)
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
    init = "zeros" if config.norm == "zero_centered_rms" else "ones"
    return Spec(shape, (None,) * len(shape), f"{name}.weight", init=init)


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


@dataclass(frozen=True)
class _Names:
    """Names of a tower's modules in a checkpoint; `out` and `fc` are within a layer."""

    prefix: str
    patch: str
    positions: str
    layers: str
    norms: tuple[str, str]
    attention: str
    out: str
    fc: tuple[str, str]


_SIGLIP = {
    "patch": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "layers": "encoder.layers",
    "norms": ("layer_norm1", "layer_norm2"),
    "attention": "self_attn",
    "out": "out_proj",
    "fc": ("mlp.fc1", "mlp.fc2"),
}
_QWEN = {
    "patch": "patch_embed.proj",
    "positions": "pos_embed",
    "layers": "blocks",
    "norms": ("norm1", "norm2"),
    "attention": "attn",
    "out": "proj",
    "fc": ("mlp.linear_fc1", "mlp.linear_fc2"),
}
_NAMES: dict[type, _Names] = {
    PixelShuffle: _Names("model.vision_model", **_SIGLIP),
    AveragePool: _Names("model.vision_tower", **_SIGLIP),
    PatchMerger: _Names("model.visual", **_QWEN),
}


_PROJECTORS: dict[type, str] = {
    PixelShuffle: "model.connector.modality_projection",
    AveragePool: "model.multi_modal_projector",
}


def vision_modules(config: VisionConfig) -> list[str]:
    """Returns the modules of a checkpoint whose weights see images."""
    projector = _PROJECTORS.get(type(config.projector))  # Qwen's is a part of the tower
    return [_NAMES[type(config.projector)].prefix, *([projector] if projector else [])]


def vision_specs(config: VisionConfig, text_size: int) -> dict[str, Any]:
    """Returns the specs of a tower and its projector.

    Args:
        config: The part of the model that sees images.
        text_size: Hidden size of the language model.
    """
    names = _NAMES[type(config.projector)]
    return {
        **_tower_specs(config.tower, names),
        "projector": _projector_specs(config, names.prefix, text_size),
    }


def _matrix(name: str, out_size: int, in_size: int, bias: bool = True) -> tuple[Spec, ...]:
    weight = Spec((out_size, in_size), ("vision", "vision"), f"{name}.weight")
    return (weight, _vector(f"{name}.bias", out_size, "zeros")) if bias else (weight,)


def _vector(name: str, size: int, init: Literal["ones", "zeros"]) -> Spec:
    return Spec((size,), (None,), name, init=init)


def _tower_specs(tower: TowerConfig, names: _Names) -> dict[str, Any]:
    D, side = tower.hidden_size, tower.patch_size
    frames = (tower.frames,) if tower.interpolated else ()  # Qwen's patches span frames, even if it is one
    shape = (D, tower.channels, *frames, side, side)
    patch, positions = f"{names.prefix}.{names.patch}", f"{names.prefix}.{names.positions}"
    specs: dict[str, Any] = {
        "patch": Spec(shape, (None,) * len(shape), f"{patch}.weight"),
        "patch_bias": _vector(f"{patch}.bias", D, "zeros"),
        "positions": Spec((tower.positions_per_side**2, D), (None, None), f"{positions}.weight"),
        "layers": [_tower_layer_specs(tower, names, index) for index in range(tower.num_layers)],
    }
    if tower.final_norm:
        specs |= _tower_norm("final_norm", f"{names.prefix}.post_layernorm", D)
    if tower.has_head:
        specs["head"] = _head_specs(tower, f"{names.prefix}.head")
    return specs


def _head_specs(tower: TowerConfig, name: str) -> dict[str, Spec]:
    """Returns the weights of SigLIP's pooling head, which are kept for others that read the checkpoint."""
    D, F = tower.hidden_size, tower.ffn_size
    shapes = {
        "probe": (1, 1, D),
        "attention.in_proj_weight": (3 * D, D),
        "attention.in_proj_bias": (3 * D,),
        "attention.out_proj.weight": (D, D),
        "attention.out_proj.bias": (D,),
        "layernorm.weight": (D,),
        "layernorm.bias": (D,),
        "mlp.fc1.weight": (F, D),
        "mlp.fc1.bias": (F,),
        "mlp.fc2.weight": (D, F),
        "mlp.fc2.bias": (D,),
    }
    return {own: Spec(shape, (None,) * len(shape), f"{name}.{own}") for own, shape in shapes.items()}


def _tower_norm(ours: str, name: str, size: int) -> dict[str, Spec]:
    return {ours: _vector(f"{name}.weight", size, "ones"), f"{ours}_bias": _vector(f"{name}.bias", size, "zeros")}


def _tower_layer_specs(tower: TowerConfig, names: _Names, index: int) -> dict[str, Spec]:
    prefix, D = f"{names.prefix}.{names.layers}.{index}", tower.hidden_size
    attention = f"{prefix}.{names.attention}"
    matrices = {"qkv": (f"{attention}.qkv", 3 * D, D)} if tower.fused_qkv else {}
    if not tower.fused_qkv:
        matrices = {name: (f"{attention}.{name}_proj", D, D) for name in ("q", "k", "v")}
    matrices |= {
        "out": (f"{attention}.{names.out}", D, D),
        "up": (f"{prefix}.{names.fc[0]}", tower.ffn_size, D),
        "down": (f"{prefix}.{names.fc[1]}", D, tower.ffn_size),
    }
    specs = {}
    for ours, theirs in zip(("attention_norm", "mlp_norm"), names.norms, strict=True):
        specs |= _tower_norm(ours, f"{prefix}.{theirs}", D)
    for ours, (name, rows, columns) in matrices.items():
        specs[ours], specs[f"{ours}_bias"] = _matrix(name, rows, columns)
    return specs


def _projector_specs(config: VisionConfig, tower: str, text_size: int) -> Any:
    D, merged = config.tower.hidden_size, config.tower.hidden_size * config.patches_per_feature
    match config.projector:
        case PixelShuffle():
            [projection] = _matrix(f"{_PROJECTORS[PixelShuffle]}.proj", text_size, merged, bias=False)
            return {"projection": projection}
        case AveragePool():
            name = _PROJECTORS[AveragePool]
            return {
                "norm": _vector(f"{name}.mm_soft_emb_norm.weight", D, "zeros"),
                "projection": Spec((D, text_size), (None, None), f"{name}.mm_input_projection_weight"),
            }
        case PatchMerger(_, layers):
            first = _merger_specs(f"{tower}.merger", D, merged, text_size)
            names = [f"{tower}.deepstack_merger_list.{number}" for number in range(len(layers))]
            return {"mergers": [first, *(_merger_specs(name, merged, merged, text_size) for name in names)]}


def _merger_specs(name: str, norm_size: int, merged: int, text_size: int) -> dict[str, Spec]:
    specs = _tower_norm("norm", f"{name}.norm", norm_size)
    specs["up"], specs["up_bias"] = _matrix(f"{name}.linear_fc1", merged, merged)
    specs["down"], specs["down_bias"] = _matrix(f"{name}.linear_fc2", text_size, merged)
    return specs
