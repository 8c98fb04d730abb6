"""Qwen3.5, dense or with a mixture of experts, with or without the part that sees images."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import needed
from groupax.models.families.qwen3_next import SHARED_EXPERT_KEYS, linear_attention_config, shared_experts
from groupax.models.families.qwen3_vl import read_merging_tower, with_axes, without_axes
from groupax.models.vision.config import VisionConfig
from groupax.terminal.printable import short_repr

UNUSED = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
VISION_KINDS = ("qwen3_5_vision", "qwen3_5", "qwen3_5_moe_vision", "qwen3_5_moe")
# Values that a file may leave out: pairs of dims that turn with each coordinate, tokens of images and videos.
_SECTIONS = (11, 11, 10)
_IMAGE_TOKENS = (248056, 248057)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen3.5: Qwen3-Next with separate matrices, and feed-forward layers in place of experts."""
    return linear_attention_config(_without_axes(hf), UNUSED)


def read_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen3.5 with experts in all layers."""
    experts = shared_experts(hf, tuple(range(needed(hf, "num_hidden_layers"))), norm_topk_prob=True)
    hf = {**_without_axes(hf), "intermediate_size": experts.ffn_size}  # which no layer has
    return linear_attention_config(hf, (*UNUSED, *SHARED_EXPERT_KEYS), experts=experts)


def read_text(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part of a model that sees images: positions in images have three coordinates."""
    return with_axes(read_config(hf), hf, _SECTIONS)


def read_moe_text(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part, with experts in all layers, of a model that sees images."""
    return with_axes(read_moe_config(hf), hf, _SECTIONS)


def read_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the tower of Qwen 3 VL, of which only the last layer's features are merged."""
    vision = read_merging_tower(hf, VISION_KINDS, (), _IMAGE_TOKENS)
    if levels := hf["vision_config"].get("deepstack_visual_indexes"):
        raise ValueError(
            f"vision_config has deepstack_visual_indexes={short_repr(levels)}; models of {hf['model_type']} have none"
        )
    return vision


def _without_axes(hf: Mapping[str, Any]) -> dict[str, Any]:
    tables = {name: without_axes(hf[name]) for name in ("rope_parameters", "rope_scaling") if hf.get(name)}
    return {**hf, **tables}
