"""Qwen 3 VL, dense or with a mixture of experts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families import qwen3, qwen3_moe
from groupax.models.families.rope import rope_table
from groupax.models.families.vision import activation_of, check_tower, vision_settings
from groupax.models.vision.config import PatchMerger, TowerConfig, VisionConfig
from groupax.terminal.printable import short_repr

KINDS = ("qwen3_vl_vision", "qwen3_vl", "qwen3_vl_moe_vision", "qwen3_vl_moe")
# Number of pairs of dims that turn with a frame, a row and a column, if the file does not say.
SECTIONS = (24, 20, 20)
# Rotary parameters that tell apart the axes of images.
AXES = ("mrope_interleaved", "mrope_section")
# Values that a file may leave out.
_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
_LEVELS = (8, 16, 24)
_IMAGE_TOKENS = (151655, 151656)


def read_text(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part: Qwen 3, whose positions in images have three coordinates (arXiv:2511.21631)."""
    return with_axes(_read_qwen3(hf, qwen3.read_config), hf, SECTIONS)


def read_moe_text(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part with experts, whose router's weights always add up to 1, in fused tensors."""
    config = _read_qwen3({**hf, "norm_topk_prob": True}, qwen3_moe.read_config)
    assert config.experts is not None, "the reader gives all models experts"
    fused = "mlp.experts.gate_up_proj"
    names = {"gate_name": fused, "up_name": fused, "down_name": "mlp.experts.down_proj"}
    experts = replace(config.experts, fused="halves", squares_are_kept=True, **names)
    return with_axes(replace(config, experts=experts), hf, SECTIONS)


def _read_qwen3(hf: Mapping[str, Any], read: Callable[[Mapping[str, Any]], ModelConfig]) -> ModelConfig:
    table = without_axes(rope_table(hf) or {})
    theta = table.get("rope_theta") or hf.get("rope_theta") or 500_000.0
    left = {key: value for key, value in hf.items() if key not in ("rope_parameters", "rope_scaling", "layer_types")}
    return read({**left, "use_sliding_window": False, "rope_parameters": {**table, "rope_theta": theta}})


def without_axes(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rotary parameters without those that tell apart the axes of images."""
    return {key: value for key, value in table.items() if key not in AXES}


def with_axes(config: ModelConfig, hf: Mapping[str, Any], default: tuple[int, int, int]) -> ModelConfig:
    """Returns a text part whose positions in images have three coordinates.

    Args:
        config: Text part, all of whose positions have one.
        hf: Its parsed `config.json`.
        default: Number of pairs of dims that turn with each coordinate, if the file does not say.

    Raises:
        ValueError: The file does not have three such numbers.
    """
    sections = tuple((rope_table(hf) or {}).get("mrope_section") or default)
    if len(sections) != 3:
        raise ValueError(f"config.json has mrope_section={list(sections)}; it must have three numbers")
    ropes = tuple(None if rope is None else replace(rope, sections=sections) for rope in config.ropes)
    return replace(config, ropes=ropes)


def read_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads a tower over images of any size, whose features of several layers are merged (arXiv:2511.21631)."""
    return read_merging_tower(hf, KINDS, _LEVELS, _IMAGE_TOKENS)


def read_merging_tower(
    hf: Mapping[str, Any], kinds: tuple[str, ...], levels: tuple[int, ...], image_tokens: tuple[int, int]
) -> VisionConfig:
    """Reads a tower of Qwen 3 VL's kind.

    Args:
        hf: Parsed `config.json` of the whole model.
        kinds: Values that the `model_type` of its `vision_config` may have.
        levels: Layers of the tower whose features the decoder's first layers add, if the file does not say.
        image_tokens: Tokens that stand for features of images and of videos, if the file does not say.

    Raises:
        ValueError: The file describes a tower that groupax does not support.
    """
    reads = frozenset([*_TOWER, "deepstack_visual_indexes", "rope_parameters"])
    settings = vision_settings(hf, kinds, reads, {**_TOWER, "deepstack_visual_indexes": levels})
    rope = dict(settings.get("rope_parameters") or {})
    if rope.get("rope_type", "axial") != "axial" or set(rope) - {"rope_type", "rope_theta"}:
        raise ValueError(f"vision_config has rope_parameters={short_repr(rope)}; groupax supports only 'axial' ones")
    layers, positions = tuple(settings["deepstack_visual_indexes"]), settings["num_position_embeddings"]
    side = math.isqrt(positions)
    if list(layers) != sorted(set(layers)) or max(layers, default=0) >= settings["depth"]:
        raise ValueError(
            f"vision_config has deepstack_visual_indexes={list(layers)}, which must be increasing layers below its "
            f"depth of {settings['depth']}"
        )
    if side**2 != positions:
        raise ValueError(f"vision_config has num_position_embeddings={positions}; groupax supports only squares")
    tower = TowerConfig(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        num_layers=settings["depth"],
        num_heads=settings["num_heads"],
        channels=settings["in_channels"],
        patch_size=settings["patch_size"],
        frames=settings["temporal_patch_size"],
        positions_per_side=side,
        norm_eps=1e-6,
        activation=activation_of(settings),
        interpolated=True,
        rope_theta=float(rope.get("rope_theta", 1e4)),
        fused_qkv=True,
        final_norm=False,
    )
    image_token, video_token = (
        hf.get(key, token) for key, token in zip(("image_token_id", "video_token_id"), image_tokens, strict=True)
    )
    return VisionConfig(
        tower=check_tower(tower),
        projector=PatchMerger(settings["spatial_merge_size"], layers),
        image_token_id=image_token,
        placeholder_ids=(image_token, video_token),
        text_prefix="model.language_model.",
        has_grid_positions=True,
    )
