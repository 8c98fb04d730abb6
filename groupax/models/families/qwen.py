"""Qwen 1.5 to 3.5, dense and with mixtures of experts, with Qwen3-Next and those that see images."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from groupax.core.terminal.printable import short_repr
from groupax.models.config import Experts, GatedDeltaNet, ModelConfig
from groupax.models.families.fields import (
    biases,
    head_dim_of,
    layer_windows,
    mixer_layers,
    model_config,
    needed,
    read_rope,
    require,
    rope_table,
    sliding_layers,
)
from groupax.models.families.vision import tower_activation, vision_settings
from groupax.models.vision.config import PatchMerger, TowerConfig, VisionConfig, VisionNames

# Values of a tower that a file may leave out: of all, and of Qwen 2 VL, 2.5 VL, and 3 VL.
_TOWER = {"num_heads": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "rope_parameters": None}
_TOWER_2 = {**_TOWER, "depth": 32, "patch_size": 14, "hidden_size": 3584, "hidden_act": "quick_gelu"}
_TOWER_2 |= {"embed_dim": 1280, "mlp_ratio": 4}
_TOWER_2_5 = {**_TOWER, "depth": 32, "patch_size": 14, "hidden_size": 3584, "hidden_act": "silu"}
_TOWER_2_5 |= {"intermediate_size": 3420, "out_hidden_size": 3584, "window_size": 112}
_TOWER_2_5 |= {"fullatt_block_indexes": (7, 15, 23, 31)}
_TOWER_3 = {**_TOWER, "depth": 27, "patch_size": 16, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh"}
_TOWER_3 |= {"intermediate_size": 4304, "out_hidden_size": 3584, "num_position_embeddings": 2304}


# -- Qwen 2 and 3


def read_qwen2(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen 2: Llama with biases of the query, key and value projections, whatever the file says."""
    return model_config(hf, windows=_windows(hf), qkv_bias=True)


def read_qwen3(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen 3: Llama with RMS norms of each head's queries and keys."""
    hf = {**hf, "head_dim": hf.get("head_dim") or 128}  # the family's default, which is not hidden_size / num_heads
    return model_config(hf, windows=_windows(hf), qk_norm="head", **biases(hf))


def _windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Returns the windows of all layers: sliding from layer `max_window_layers` on, if they are enabled."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    return layer_windows(sliding_layers(hf, lambda index: index >= hf.get("max_window_layers", 28)), window)


def read_qwen3_moe(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen 3 MoE: experts in every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    return model_config(
        hf,
        windows=window,
        qk_norm="head",
        experts=_experts(hf, _sparse_layers(hf), hf.get("norm_topk_prob", False)),
        **biases(hf),
    )


def read_qwen2_moe(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen 1.5 and 2 MoE: Qwen 2 with experts in some layers, and a gated one for every token with them.

    Windows, if they are enabled, are in every other layer before layer `max_window_layers`.
    """
    window, end = (
        hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None,
        hf.get("max_window_layers", 28),
    )
    return model_config(
        hf,
        windows=layer_windows(sliding_layers(hf, lambda index: index % 2 == 0 and index < end), window),
        qkv_bias=hf.get("qkv_bias", True),
        experts=_some_with_shared_expert(hf, hf.get("norm_topk_prob", False)),
    )


def _sparse_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    return tuple(i for i in range(hf.get("num_hidden_layers", 0)) if (i + 1) % step == 0 and i not in dense)


def _experts(hf: Mapping[str, Any], layers: tuple[int, ...], norm_topk_prob: bool, **others: Any) -> Experts:
    return Experts(
        num=needed(hf, "num_experts", "num_local_experts"),
        per_token=needed(hf, "num_experts_per_tok"),
        ffn_size=needed(hf, "moe_intermediate_size"),
        norm_topk_prob=norm_topk_prob,
        layers=layers,
        aux_loss_coef=hf.get("router_aux_loss_coef", 0.001),
        **others,
    )


# -- Qwen3-Next and Qwen3.5


def read_qwen3_next(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts with a gated shared one."""
    require(hf, {"use_sliding_window": False})
    needed(hf, "num_hidden_layers")
    experts = _some_with_shared_expert(hf, hf.get("norm_topk_prob", True))
    return _linear_attention(hf, fused=True, experts=experts)


def read_qwen3_5(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen3.5: Qwen3-Next with separate matrices, and feed-forward layers in place of experts."""
    return _linear_attention(hf)


def read_qwen3_5_moe(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen3.5 with experts in all layers."""
    experts = _with_shared_expert(hf, tuple(range(needed(hf, "num_hidden_layers"))), norm_topk_prob=True)
    return _linear_attention({**hf, "intermediate_size": experts.ffn_size}, experts=experts)  # which no layer has


def _some_with_shared_expert(hf: Mapping[str, Any], norm_topk_prob: bool) -> Experts | None:
    """Returns the experts of the sparse layers; None if there is no such layer."""
    layers = () if hf.get("num_experts") == 0 else _sparse_layers(hf)
    return _with_shared_expert(hf, layers, norm_topk_prob) if layers else None


def _with_shared_expert(hf: Mapping[str, Any], layers: tuple[int, ...], norm_topk_prob: bool) -> Experts:
    """Returns the experts of these layers, besides which there is one for every token, with a gate."""
    size = needed(hf, "shared_expert_intermediate_size")
    shared = {"shared_ffn_size": size, "has_shared_gate": True, "shared_name": "mlp.shared_expert"}
    return _experts(hf, layers, norm_topk_prob, **shared)


def _linear_attention(hf: Mapping[str, Any], fused: bool = False, **overrides: Any) -> ModelConfig:
    """Returns the architecture of a model of Qwen3-Next's kind.

    Args:
        fused: Whether the matrices of a gated delta net are fused (see `GatedDeltaNet`).
        overrides: Fields of the calling family (see `model_config`).
    """
    hf = {"head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32_768, **hf}
    require(hf, {"attn_output_gate": True, "mamba_ssm_dtype": "float32"})
    layers = range(needed(hf, "num_hidden_layers"))
    if not hf.get("layer_types"):
        interval = hf.get("full_attention_interval", 4)
        hf["layer_types"] = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in layers]
    linear = mixer_layers(hf, "linear_attention")
    net = GatedDeltaNet(
        layers=linear,
        size=hf.get("linear_conv_kernel_dim", 4),
        num_key_heads=hf.get("linear_num_key_heads", 16),
        num_value_heads=hf.get("linear_num_value_heads", 32),
        key_dims=hf.get("linear_key_head_dim", 128),
        value_dims=hf.get("linear_value_head_dim", 128),
        fused=fused,
    )
    rope = read_rope(hf, head_dim_of(hf), partial=True)
    return model_config(
        hf,
        ropes=tuple(None if layer in linear else rope for layer in layers),
        norm="zero_centered_rms",
        qk_norm="head",
        attention_gate=True,
        recurrent=net if linear else None,
        **biases(hf),
        **overrides,
    )


# -- models that see images


def read_qwen2_vl_text(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part of Qwen 2 or 2.5 VL: Qwen 2 with positions of three coordinates (arXiv:2409.12191)."""
    hf = {"rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6, **hf}
    require(hf, {"head_dim": needed(hf, "hidden_size") // needed(hf, "num_attention_heads")})
    rope = read_rope(hf, head_dim_of(hf), kinds={"mrope": "default"})
    config = model_config(hf, ropes=rope, windows=_windows(hf), qkv_bias=True)
    return _with_axes(config, hf, (16, 24, 24), mixed=False)


def read_qwen3_vl_text(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part: Qwen 3, whose positions in images have three coordinates (arXiv:2511.21631)."""
    return _with_axes(_read_qwen3(hf, read_qwen3), hf, (24, 20, 20))


def read_qwen3_vl_moe_text(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part with experts, whose router's weights always add up to 1, in fused tensors."""
    config = _read_qwen3({**hf, "norm_topk_prob": True}, read_qwen3_moe)
    assert config.experts is not None, "the reader gives all models experts"
    fused = "mlp.experts.gate_up_proj"
    names = {"gate_name": fused, "up_name": fused, "down_name": "mlp.experts.down_proj"}
    experts = replace(config.experts, fused="halves", squares_are_kept=True, **names)
    return _with_axes(replace(config, experts=experts), hf, (24, 20, 20))


def read_qwen3_5_text(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part of a Qwen3.5 that sees images: positions in images have three coordinates."""
    return _with_axes(read_qwen3_5(hf), hf, (11, 11, 10))


def read_qwen3_5_moe_text(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part, with experts in all layers, of a Qwen3.5 that sees images."""
    return _with_axes(read_qwen3_5_moe(hf), hf, (11, 11, 10))


def read_qwen2_vl_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads a tower over images of any size, without learned positions (arXiv:2409.12191)."""
    settings = vision_settings(hf, ("qwen2_vl_vision", "qwen2_vl"), _TOWER_2)
    size = settings["embed_dim"]
    return _vision(hf, settings, "qwen2_vl", hidden_size=size, ffn_size=size * settings["mlp_ratio"], patch_bias=False)


def read_qwen2_5_vl_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads a tower with RMS norms, gated layers, and windows in all but a few of them (arXiv:2502.13923)."""
    settings = vision_settings(hf, ("qwen2_5_vl_vision", "qwen2_5_vl"), _TOWER_2_5)
    merge, patch = settings["spatial_merge_size"], settings["patch_size"]
    window = settings["window_size"] // merge // patch * merge
    if not window:
        raise ValueError(
            f"vision_config has window_size={settings['window_size']}; it must be at least {merge * patch}, the pixels "
            "along a side of a feature"
        )
    return _vision(
        hf,
        settings,
        "qwen2_5_vl",
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        norm="rms",
        is_gated=True,
        patch_bias=False,
        window=window,
        whole_layers=tuple(settings["fullatt_block_indexes"]),
    )


def read_qwen3_vl_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads a tower over images of any size, whose features of several layers are merged (arXiv:2511.21631)."""
    kinds = ("qwen3_vl_vision", "qwen3_vl", "qwen3_vl_moe_vision", "qwen3_vl_moe")
    return _interpolating_tower(hf, kinds, (8, 16, 24), (151655, 151656))


def read_qwen3_5_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the tower of Qwen 3 VL, where only the last layer's features are merged."""
    kinds = ("qwen3_5_vision", "qwen3_5", "qwen3_5_moe_vision", "qwen3_5_moe")
    vision = _interpolating_tower(hf, kinds, (), (248056, 248057))
    if levels := hf["vision_config"].get("deepstack_visual_indexes"):
        raise ValueError(
            f"vision_config has deepstack_visual_indexes={short_repr(levels)}; models of {hf['model_type']} have none"
        )
    return vision


def _read_qwen3(hf: Mapping[str, Any], read: Callable[[Mapping[str, Any]], ModelConfig]) -> ModelConfig:
    table = rope_table(hf) or {}
    theta = table.get("rope_theta") or hf.get("rope_theta") or 500_000.0
    left = {key: value for key, value in hf.items() if key not in ("rope_parameters", "rope_scaling", "layer_types")}
    return read({**left, "use_sliding_window": False, "rope_parameters": {**table, "rope_theta": theta}})


def _with_axes(
    config: ModelConfig, hf: Mapping[str, Any], default: tuple[int, int, int], mixed: bool = True
) -> ModelConfig:
    """Returns a text part whose positions in images have three coordinates.

    Args:
        config: Text part, all of whose positions have one.
        default: Number of pairs of dims that turn with a frame, a row and a column, if the file does not say.
        mixed: Whether these pairs take turns (see `Rope.mixed_sections`).
    """
    sections = tuple((rope_table(hf) or {}).get("mrope_section") or default)
    if len(sections) != 3 or not (mixed or 2 * sum(sections) == config.head_dim):
        total = "" if mixed else f" that add up to {config.head_dim // 2}, half of a head's dims"
        raise ValueError(f"config.json has mrope_section={list(sections)}; it must have three numbers{total}")
    ropes = (None if rope is None else replace(rope, sections=sections, mixed_sections=mixed) for rope in config.ropes)
    return replace(config, ropes=tuple(ropes))


def _interpolating_tower(
    hf: Mapping[str, Any], kinds: tuple[str, ...], levels: tuple[int, ...], image_tokens: tuple[int, int]
) -> VisionConfig:
    """Reads a tower of Qwen 3 VL's kind.

    Args:
        hf: Parsed `config.json` of the whole model.
        kinds: Values that the `model_type` of its `vision_config` may have.
        levels: Layers of the tower whose features the decoder's first layers add, if the file does not say.
        image_tokens: Tokens that stand for features of images and of videos, if the file does not say.
    """
    settings = vision_settings(hf, kinds, {**_TOWER_3, "deepstack_visual_indexes": levels})
    layers, positions = tuple(settings["deepstack_visual_indexes"]), settings["num_position_embeddings"]
    side = math.isqrt(positions)
    if list(layers) != sorted(set(layers)) or max(layers, default=0) >= settings["depth"]:
        raise ValueError(
            f"vision_config has deepstack_visual_indexes={list(layers)}, which must be increasing layers below its "
            f"depth of {settings['depth']}"
        )
    if side**2 != positions:
        raise ValueError(f"vision_config has num_position_embeddings={positions}; groupax supports only squares")
    return _vision(
        hf,
        settings,
        "qwen3_vl",
        layers=layers,
        image_tokens=image_tokens,
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        positions_per_side=side,
        interpolated=True,
    )


def _vision(
    hf: Mapping[str, Any],
    settings: Mapping[str, Any],
    names: VisionNames,
    layers: tuple[int, ...] = (),
    image_tokens: tuple[int, int] = (151655, 151656),
    positions_per_side: int | None = None,
    **fields: Any,
) -> VisionConfig:
    """Returns a tower with rotary embeddings of rows and columns over images of any size.

    Args:
        settings: Checked `vision_config` of the parsed `config.json`.
        layers: Layers of the tower whose features the decoder's first layers add.
        image_tokens: Tokens that stand for features of images and of videos, if the file does not say.
        fields: Fields of `TowerConfig` in which families differ.
    """
    rope = dict(settings["rope_parameters"] or {})
    if rope.get("rope_type", "axial") != "axial" or set(rope) - {"rope_type", "rope_theta"}:
        raise ValueError(f"vision_config has rope_parameters={short_repr(rope)}; groupax supports only 'axial' ones")
    tower = TowerConfig(
        num_layers=settings["depth"],
        num_heads=settings["num_heads"],
        channels=settings["in_channels"],
        patch_size=settings["patch_size"],
        frames=settings["temporal_patch_size"],
        positions_per_side=positions_per_side,
        norm_eps=1e-6,
        activation=tower_activation(settings),
        rope_theta=float(rope.get("rope_theta", 1e4)),
        fused_qkv=True,
        final_norm=False,
        **fields,
    )
    image_token, video_token = (
        hf.get(f"{kind}_token_id", token) for kind, token in zip(("image", "video"), image_tokens, strict=True)
    )
    return VisionConfig(
        tower=tower,
        projector=PatchMerger(settings["spatial_merge_size"], layers),
        image_token_id=image_token,
        placeholder_ids=(image_token, video_token),
        names=names,
        text_prefix="model.language_model.",
        has_grid_positions=True,
    )
