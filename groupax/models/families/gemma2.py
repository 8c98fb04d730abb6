"""Gemma 2."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import layer_windows, model_config, require, sliding_layers

KEYS = (
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
    "use_bidirectional_attention",
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Gemma 2: sandwich norms, softcaps, and a sliding window in every other layer."""
    hf = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **with_defaults(hf)}
    sliding = sliding_layers(hf, lambda index: index % 2 == 0)
    return model_config(hf, KEYS, windows=layer_windows(sliding, hf.get("sliding_window", 4096)), **overrides(hf))


def with_defaults(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the file with Gemma's defaults for missing keys."""
    require(hf, "use_bidirectional_attention", False)
    activation = hf.get("hidden_activation") or "gelu_pytorch_tanh"
    return {"head_dim": 256, "tie_word_embeddings": True, **hf, "hidden_act": activation}


def overrides(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields in which Gemma 2 and 3 differ from Llama."""
    return {
        "block": "sandwich_norm",
        "norm": "zero_centered_rms",
        "attention_scale": float(hf.get("query_pre_attn_scalar", 256)) ** -0.5,
        "attention_softcap": hf.get("attn_logit_softcapping"),
        "logit_softcap": hf.get("final_logit_softcapping"),
        "embedding_scale": float(hf.get("hidden_size", 1)) ** 0.5,
        "qkv_bias": hf.get("attention_bias", False),
        "o_bias": hf.get("attention_bias", False),
    }
