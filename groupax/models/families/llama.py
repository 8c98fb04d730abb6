"""Llama and the families that differ from it in few fields: Phi 3, Granite, Seed-OSS and SmolLM 3."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import (
    biases,
    head_dim_of,
    layer_windows,
    layers_with_rope,
    model_config,
    needed,
    read_rope,
    sliding_layers,
)


def read_llama(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Llama 2 to 3.2: RMS norms, rotary embeddings and SwiGLU, with biases if the file says so."""
    return model_config(hf, "attention_bias mlp_bias", mlp_bias=hf.get("mlp_bias", False), **biases(hf))


def read_phi3(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Phi 3: Llama with fused projections, a sliding window in all layers, and partial rotary embeddings."""
    hf = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **hf}
    # both are older names of longrope
    rope = read_rope(hf, head_dim_of(hf), kinds={"su": "longrope", "yarn": "longrope"}, partial=True)
    num_layers = needed(hf, "num_hidden_layers")
    windows = (hf.get("sliding_window"),) * num_layers
    fused = {"fused_qkv": True, "fused_gate_up": True}
    return model_config(hf, "sliding_window", ropes=(rope,) * num_layers, windows=windows, **fused)


def read_granite(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Granite: Llama with multipliers of embeddings, attention scores, residuals and logits."""
    return model_config(
        hf,
        "attention_bias attention_multiplier embedding_multiplier logits_scaling mlp_bias residual_multiplier",
        attention_scale=float(hf.get("attention_multiplier", 1.0)),
        embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / hf.get("logits_scaling", 1.0),
        mlp_bias=hf.get("mlp_bias", False),
        **biases(hf),
    )


def read_seed_oss(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Seed-OSS: Llama with biases of the query, key and value projections by default, and heads of 128 dims."""
    return model_config(
        {"head_dim": 128, **hf},
        "attention_bias attention_out_bias mlp_bias residual_dropout",
        qkv_bias=hf.get("attention_bias", True),
        o_bias=hf.get("attention_out_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
    )


def read_smollm3(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads SmolLM 3: Llama in which every fourth layer, or those that the file lists, have no positions."""
    hf = {"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4, **hf}
    rope, has_rope = read_rope(hf, head_dim_of(hf)), layers_with_rope(hf)
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    return model_config(
        hf,
        "attention_bias layer_types max_window_layers mlp_bias no_rope_layer_interval no_rope_layers sliding_window "
        "use_sliding_window",
        ropes=tuple(rope if each else None for each in has_rope),
        windows=layer_windows(sliding_layers(hf, lambda index: not has_rope[index]), window),
        mlp_bias=hf.get("mlp_bias", False),
        **biases(hf),
    )
