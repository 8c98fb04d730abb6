"""Qwen3.5: the text parts, dense or with a mixture of experts."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import needed
from groupax.models.families.qwen3_next import SHARED_EXPERT_KEYS, linear_attention_config, shared_experts
from groupax.models.families.rope import rope_table

UNUSED = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
# Rotary parameters that tell apart the axes of images; all axes of a text have the same positions.
AXES = ("mrope_interleaved", "mrope_section")


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen3.5: Qwen3-Next with separate matrices, and feed-forward layers in place of experts."""
    return linear_attention_config(_without_axes(hf), UNUSED)


def read_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen3.5 with experts in all layers."""
    experts = shared_experts(hf, tuple(range(needed(hf, "num_hidden_layers"))), norm_topk_prob=True)
    hf = {**_without_axes(hf), "intermediate_size": experts.ffn_size}  # which no layer has
    return linear_attention_config(hf, (*UNUSED, *SHARED_EXPERT_KEYS), experts=experts)


def _without_axes(hf: Mapping[str, Any]) -> dict[str, Any]:
    table = rope_table(hf)
    if not table:
        return dict(hf)
    tables = {name: hf[name] for name in ("rope_parameters", "rope_scaling") if hf.get(name)}
    return {**hf, **{name: {k: v for k, v in each.items() if k not in AXES} for name, each in tables.items()}}
