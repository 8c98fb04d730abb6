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
from groupax.models.vision.config import AveragePool, PatchMerger, PixelShuffle, TowerConfig, VisionConfig, VisionNames


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
        return self.is_matrix and "vocab" not in self.axes and not self.is_vision_matrix

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

# The bias that is added to the experts' scores for their choice, which is not trained, and its names in checkpoints.
ROUTER_CORRECTION, CORRECTION_NAMES = "router_correction", ("e_score_correction_bias", "expert_bias")
# Weights that are kept in float32.
FLOAT32 = (ROUTER_CORRECTION, "a_log", "dt_bias", "magnitude", "norms")


def embedding_name(config: ModelConfig) -> str:
    """Returns the name of the embedding in a checkpoint."""
    return f"{config.prefix}{config.module('embed', 'embed_tokens')}.weight"


def head_name(config: ModelConfig) -> str:
    """Returns the name of the head in a checkpoint; a tied model has only the embedding."""
    return f"{config.module('head', 'lm_head')}.weight"


def model_specs(config: ModelConfig) -> Params:
    """Returns a model's tree of `Spec`s.

    It has `embed`, `layers` (a list of dicts), `final_norm`, `head` or `score`, `positions` if they are learned, and
    `vision` if the model sees images.
    """
    D, V = config.hidden_size, config.vocab_size
    specs: Params = {
        "embed": Spec((V, D), ("vocab", "embed"), embedding_name(config)),
        "layers": [layer_specs(config, index) for index in range(config.num_layers)],
        **_norm_specs(config, "final_norm", f"{config.prefix}{config.module('final_norm', 'norm')}"),
    }
    if config.num_learned_positions:
        name = f"{config.prefix}{config.module('positions', 'positions')}.weight"
        specs["positions"] = Spec((config.num_learned_positions, D), (None, "embed"), name)
    if config.vision is not None:
        specs["vision"] = vision_specs(config.vision, D)
    if config.num_labels:
        specs["score"] = Spec((config.num_labels, D), (None, "embed"), "score.weight")
    elif not config.tie_embeddings:
        specs["head"] = Spec((V, D), ("vocab", "embed"), head_name(config))
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
    "parallel_norms": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
}


def layer_specs(config: ModelConfig, index: int) -> dict[str, Spec]:
    """Returns the `Spec`s of one layer."""
    prefix, D = f"{config.prefix}{config.module('layers', 'layers')}.{index}", config.hidden_size
    specs: dict[str, Spec] = {}
    for ours, theirs in _BLOCK_NORMS[config.block].items():
        specs |= _norm_specs(config, ours, f"{prefix}.{theirs}")
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
    if config.transposed:
        specs = {name: replace(spec, is_transposed=spec.is_matrix) for name, spec in specs.items()}
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
    init = "zeros" if config.norm.startswith("zero_centered") else "ones"
    return Spec(shape, (None,) * len(shape), f"{name}.weight", init=init)


def _norm_specs(config: ModelConfig, own: str, name: str) -> dict[str, Spec]:
    """Returns a norm of hidden states, and its bias if it has one."""
    shape = (config.hidden_size,)
    bias = {f"{own}_bias": Spec(shape, (None,), f"{name}.bias", init="zeros")} if config.norm_bias else {}
    return {own: _norm_spec(config, shape, name), **bias}


# Output dims of matrices that a mesh may shard; their biases are sharded too.
_SHARDED_OUTPUTS = ("heads", "kv_heads", "ffn")


def _linear(
    own: str, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], bias: bool = False
) -> dict[str, Spec]:
    """Returns a matrix, or a convolution's weight, and its bias if it has one."""
    specs = {own: Spec(shape, axes, f"{name}.weight")}
    if bias:
        axis = axes[0] if axes[0] in _SHARDED_OUTPUTS else None
        specs[f"{own}_bias"] = Spec(shape[:1], (axis,), f"{name}.bias", init="zeros")
    return specs


def _fuse(specs: dict[str, Spec], names: tuple[str, ...], tensor: str) -> None:
    """Makes some of the matrices rows of one tensor, in this order."""
    first_row, num_rows = 0, sum(specs[name].shape[0] for name in names)
    for name in names:
        specs[name] = replace(specs[name], name=tensor, first_row=first_row, num_rows=num_rows)
        first_row += specs[name].shape[0]


def _attention_specs(config: ModelConfig, prefix: str) -> dict[str, Spec]:
    D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    at, specs = f"{prefix}.self_attn", {}
    sizes = {"q": N * H * (2 if config.attention_gate else 1), "k": K * H, "v": K * H}
    axes = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
    if config.joint_qkv:
        sizes, axes = {"qkv": 3 * N * H}, {"qkv": "heads" if config.joint_qkv == "by_head" else "mixer"}
    for name, size in sizes.items():
        specs |= _linear(name, f"{at}.{name}_proj", (size, D), (axes[name], "embed"), config.qkv_bias)
    if config.fused_qkv:
        _fuse(specs, ("q", "k", "v"), f"{at}.qkv_proj.weight")
    specs |= _linear("o", f"{at}.o_proj", (D, N * H), ("embed", "heads"), config.o_bias)
    if config.sinks:
        specs["sinks"] = Spec((N,), ("heads",), f"{at}.sinks")
    if config.qk_norm not in ("none", "after_rope"):
        shapes = {"each_head": ((N, H), (K, H)), "all_heads": ((N * H,), (K * H,))}.get(config.qk_norm, ((H,), (H,)))
        for name, axis, shape in zip(("q_norm", "k_norm"), ("heads", "kv_heads"), shapes, strict=True):
            norm = _norm_spec(config, shape, f"{at}.{name}")
            specs[name] = replace(norm, axes=(axis, None)) if config.qk_norm == "each_head" else norm
    return specs


def _latent_specs(config: ModelConfig, prefix: str) -> dict[str, Spec]:
    latent, D, N = config.latent, config.hidden_size, config.num_heads
    assert latent is not None, "the model has latent attention"
    at, rank, bias = f"{prefix}.self_attn", latent.query_rank, config.qkv_bias
    q_rows, kv_rows = N * (latent.plain_dims + latent.rope_dims), N * (latent.plain_dims + latent.value_dims)
    if rank is None:
        queries = _linear("q", f"{at}.q_proj", (q_rows, D), ("heads", "embed"))
    else:
        queries = {
            **_linear("q_down", f"{at}.q_a_proj", (rank, D), ("compressed", "embed"), bias),
            "q_latent_norm": _norm_spec(config, (rank,), f"{at}.q_a_layernorm"),
            **_linear("q_up", f"{at}.q_b_proj", (q_rows, rank), ("heads", "latent")),
        }
    return {
        **queries,
        **_linear("kv_down", f"{at}.kv_a_proj_with_mqa", (latent.cached_dims, D), ("compressed", "embed"), bias),
        "kv_latent_norm": _norm_spec(config, (latent.rank,), f"{at}.kv_a_layernorm"),
        **_linear("kv_up", f"{at}.kv_b_proj", (kv_rows, latent.rank), ("heads", "latent")),
        **_linear("o", f"{at}.o_proj", (D, N * latent.value_dims), ("embed", "heads"), config.o_bias),
    }


def _convolution_specs(convolution: ShortConvolution, D: int, prefix: str) -> dict[str, Spec]:
    name, bias = f"{prefix}.conv", convolution.has_bias
    return {
        **_linear("conv_in", f"{name}.in_proj", (3 * D, D), ("mixer", "embed"), bias),
        **_linear("conv", f"{name}.conv", (D, 1, convolution.size), (None, None, None), bias),
        **_linear("conv_out", f"{name}.out_proj", (D, D), ("embed", "mixer"), bias),
    }


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
    specs: dict[str, Spec] = {}
    for own, (theirs, rows) in into.items():
        specs |= _linear(own, f"{name}.{theirs}", (rows, D), ("mixer", "embed"))
    return specs | {
        "conv": Spec((net.mixed_dims, 1, net.size), (None, None, None), f"{name}.conv1d.weight"),
        "dt_bias": Spec((V,), (None,), f"{name}.dt_bias", init="ones", is_float32=True),
        "a_log": Spec((V,), (None,), f"{name}.A_log", init="log_uniform", is_float32=True),
        "delta_norm": Spec((net.value_dims,), (None,), f"{name}.norm.weight", init="ones"),
        "delta_out": Spec((D, values), ("embed", "mixer"), f"{name}.out_proj.weight"),
    }


def _mlp_specs(config: ModelConfig, prefix: str) -> dict[str, Spec]:
    specs = _gated_specs("", f"{prefix}.mlp", (config.hidden_size, config.ffn_size), "ffn", config.mlp_bias)
    if not config.gated:
        return {name: spec for name, spec in specs.items() if not name.startswith("gate")}
    if config.fused_gate_up:
        _fuse(specs, ("gate", "up"), f"{prefix}.mlp.gate_up_proj.weight")
    return specs


def _gated_specs(own: str, name: str, sizes: tuple[int, int], axis: str, bias: bool = False) -> dict[str, Spec]:
    """Returns the matrices of a feed-forward layer of sizes D and F, by our names with the prefix `own`."""
    D, F = sizes
    return {
        **_linear(f"{own}gate", f"{name}.gate_proj", (F, D), (axis, "embed"), bias),
        **_linear(f"{own}up", f"{name}.up_proj", (F, D), (axis, "embed"), bias),
        **_linear(f"{own}down", f"{name}.down_proj", (D, F), ("embed", axis), bias),
    }


def _expert_specs(experts: Experts, D: int, prefix: str) -> dict[str, Spec]:
    """Returns a router and its experts; fused tensors may be transposed, and have gate and up in one of them."""
    E, F = experts.num, experts.ffn_size
    first_row, row_step = (1, 2) if experts.fused == "alternating" else (F, 1)
    specs = _linear("router", f"{prefix}.{experts.router_name}", (E, D), (None, "embed"), experts.has_bias)
    for own, name in (("gate", experts.gate_name), ("up", experts.up_name), ("down", experts.down_name)):
        if own == "down":
            shape, axes, axis = (E, D, F), ("expert", "embed", "expert_ffn"), None
        else:
            shape, axes, axis = (E, F, D), ("expert", "expert_ffn", "embed"), "expert_ffn"
        spec = Spec(shape, axes, f"{prefix}.{name}" if experts.fused else f"{prefix}.{name}.weight")
        if experts.fused and own != "down":
            first = first_row if own == "up" else 0
            spec = replace(spec, first_row=first, num_rows=2 * F, row_dim=1, row_step=row_step)
        if experts.has_bias:
            bias = replace(spec, shape=shape[:2], axes=("expert", axis), name=f"{spec.name}_bias", init="zeros")
            specs[f"expert_{own}_bias"] = bias
        _, out_size, in_size = spec.fused_shape
        is_kept = experts.squares_are_kept and out_size == in_size
        is_transposed = experts.fused is not None and experts.fused_is_transposed and not is_kept
        specs[f"expert_{own}"] = replace(spec, is_transposed=is_transposed)
    if experts.has_correction:
        name = f"{prefix}.{experts.correction_name}"
        specs[ROUTER_CORRECTION] = Spec((E,), (None,), name, init="zeros", is_float32=True)
    if experts.shared_ffn_size:
        name = f"{prefix}.{experts.shared_name}"
        specs |= _gated_specs("shared_", name, (D, experts.shared_ffn_size), "shared_ffn")
        if experts.has_shared_gate:
            specs |= _linear("shared_logit", f"{name}_gate", (1, D), ("mixer", "embed"))
    return specs


def spec_leaves(config: ModelConfig) -> Iterator[Spec]:
    """Iterates over the specs in the order in which jax flattens the parameters."""
    return iter(jax.tree.leaves(model_specs(config)))


def num_params(config: ModelConfig) -> int:
    """Counts the parameters of a model."""
    return sum(math.prod(spec.shape) for spec in spec_leaves(config))


@dataclass(frozen=True)
class _Names:
    """Names of a tower's modules in a checkpoint, by default SigLIP's; `out`, `fc` and `gate` are within a layer.

    The projector's is None if it is a part of the tower, and `merger` has those within it.
    """

    prefix: str
    projector: str | None = None
    patch: str = "embeddings.patch_embedding"
    positions: str = "embeddings.position_embedding"
    layers: str = "encoder.layers"
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    out: str = "out_proj"
    fc: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    gate: str = "mlp.gate_proj"
    merger: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")


_QWEN2_VL = _Names(
    "model.visual",
    patch="patch_embed.proj",
    positions="pos_embed",
    layers="blocks",
    norms=("norm1", "norm2"),
    attention="attn",
    out="proj",
)
_NAMES: dict[VisionNames, _Names] = {
    "gemma3": _Names("model.vision_tower", "model.multi_modal_projector"),
    "idefics3": _Names("model.vision_model", "model.connector.modality_projection"),
    "qwen2_5_vl": replace(_QWEN2_VL, fc=("mlp.up_proj", "mlp.down_proj")),
    "qwen2_vl": _QWEN2_VL,
    "qwen3_vl": replace(
        _QWEN2_VL, fc=("mlp.linear_fc1", "mlp.linear_fc2"), merger=("norm", "linear_fc1", "linear_fc2")
    ),
}


def vision_modules(config: VisionConfig) -> list[str]:
    """Returns the modules of a checkpoint whose weights see images."""
    names = _NAMES[config.names]
    return [each for each in (names.prefix, names.projector) if each]


def vision_specs(config: VisionConfig, text_size: int) -> dict[str, Any]:
    """Returns the specs of a tower and its projector."""
    names, tower = _NAMES[config.names], config.tower
    D, side, num_positions = tower.hidden_size, tower.patch_size, tower.positions_per_side
    frames = (tower.frames,) if config.has_grid_positions else ()  # Qwen's patches span frames, even if it is one
    shape = (D, tower.channels, *frames, side, side)
    specs: dict[str, Any] = {
        **_linear("patch", f"{names.prefix}.{names.patch}", shape, (None,) * len(shape), tower.patch_bias),
        "layers": [_tower_layer_specs(tower, names, index) for index in range(tower.num_layers)],
        "projector": _projector_specs(config, names, text_size),
    }
    if num_positions is not None:
        specs["positions"] = Spec((num_positions**2, D), (None, None), f"{names.prefix}.{names.positions}.weight")
    if tower.final_norm:
        specs |= _tower_norm(tower, "final_norm", f"{names.prefix}.post_layernorm", D)
    return specs


def _tower_matrix(own: str, name: str, out_size: int, in_size: int, bias: bool = True) -> dict[str, Spec]:
    return _linear(own, name, (out_size, in_size), ("vision", "vision"), bias)


def _tower_norm(tower: TowerConfig, own: str, name: str, size: int) -> dict[str, Spec]:
    specs = {own: Spec((size,), (None,), f"{name}.weight", init="ones")}
    if tower.norm == "layer":
        specs[f"{own}_bias"] = Spec((size,), (None,), f"{name}.bias", init="zeros")
    return specs


def _tower_layer_specs(tower: TowerConfig, names: _Names, index: int) -> dict[str, Spec]:
    prefix, D = f"{names.prefix}.{names.layers}.{index}", tower.hidden_size
    attention, (up, down) = f"{prefix}.{names.attention}", names.fc
    specs: dict[str, Spec] = {}
    for own, theirs in zip(("attention_norm", "mlp_norm"), names.norms, strict=True):
        specs |= _tower_norm(tower, own, f"{prefix}.{theirs}", D)
    if tower.is_gated:
        specs |= _tower_matrix("gate", f"{prefix}.{names.gate}", tower.ffn_size, D)
    if tower.fused_qkv:
        specs |= _tower_matrix("qkv", f"{attention}.qkv", 3 * D, D)
    else:
        for own in ("q", "k", "v"):
            specs |= _tower_matrix(own, f"{attention}.{own}_proj", D, D)
    return {
        **specs,
        **_tower_matrix("out", f"{attention}.{names.out}", D, D),
        **_tower_matrix("up", f"{prefix}.{up}", tower.ffn_size, D),
        **_tower_matrix("down", f"{prefix}.{down}", D, tower.ffn_size),
    }


def _projector_specs(config: VisionConfig, names: _Names, text_size: int) -> Any:
    D, merged = config.tower.hidden_size, config.tower.hidden_size * config.patches_per_feature
    match config.projector:
        case PixelShuffle():
            return _tower_matrix("projection", f"{names.projector}.proj", text_size, merged, bias=False)
        case AveragePool():
            norm, matrix = f"{names.projector}.mm_soft_emb_norm", f"{names.projector}.mm_input_projection_weight"
            return {
                "norm": Spec((D,), (None,), f"{norm}.weight", init="zeros"),
                "projection": Spec((D, text_size), (None, None), matrix),
            }
        case PatchMerger(_, layers):
            modules = [("merger", D), *((f"deepstack_merger_list.{number}", merged) for number in range(len(layers)))]
            norm, up, down = names.merger
            mergers = [
                {
                    **_tower_norm(config.tower, "norm", f"{names.prefix}.{module}.{norm}", norm_size),
                    **_tower_matrix("up", f"{names.prefix}.{module}.{up}", merged, merged),
                    **_tower_matrix("down", f"{names.prefix}.{module}.{down}", text_size, merged),
                }
                for module, norm_size in modules
            ]
            return {"mergers": mergers}
