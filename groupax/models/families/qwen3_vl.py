"""Qwen 3 VL."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families import qwen3
from groupax.models.families.rope import rope_table
from groupax.models.families.vision import activation_of, check_tower, vision_settings
from groupax.models.vision.config import PatchMerger, TowerConfig, VisionConfig
from groupax.terminal.printable import short_repr

# Number of pairs of dims that turn with a frame, a row and a column, if the file does not say.
SECTIONS = (24, 20, 20)
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
    "deepstack_visual_indexes": (8, 16, 24),
}


def read_text(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part: Qwen 3, whose positions in images have three coordinates (arXiv:2511.21631)."""
    table = dict(rope_table(hf) or {})
    sections = tuple(table.pop("mrope_section", None) or SECTIONS)
    table.pop("mrope_interleaved", None)
    left = {key: value for key, value in hf.items() if key not in ("rope_parameters", "rope_scaling", "layer_types")}
    theta = table.get("rope_theta") or hf.get("rope_theta") or 500_000.0
    config = qwen3.read_config({**left, "use_sliding_window": False, "rope_parameters": {**table, "rope_theta": theta}})
    [rope] = set(config.ropes)
    assert rope is not None, "all layers have rotary embeddings"
    if len(sections) != 3:
        raise ValueError(f"config.json has mrope_section={list(sections)}; it must have three numbers")
    return replace(config, ropes=(replace(rope, sections=sections),) * config.num_layers)


def read_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads a tower over images of any size, whose features of several layers are merged (arXiv:2511.21631)."""
    reads = frozenset([*_TOWER, "rope_parameters"])
    settings = vision_settings(hf, ("qwen3_vl_vision", "qwen3_vl", "qwen3_vl_moe"), reads, _TOWER)
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
    image_token, video_token = hf.get("image_token_id", 151655), hf.get("video_token_id", 151656)
    return VisionConfig(
        tower=check_tower(tower),
        projector=PatchMerger(settings["spatial_merge_size"], layers),
        image_token_id=image_token,
        placeholder_ids=(image_token, video_token),
        text_prefix="model.language_model.",
        has_grid_positions=True,
    )
