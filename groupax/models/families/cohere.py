"""Command R and Aya 23 (Cohere)."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import head_dim_of, model_config, needed
from groupax.models.families.rope import read_rope

KEYS = ("attention_bias", "layer_norm_eps", "logit_scale")


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Cohere: attention and feed-forward in parallel after one layer norm, and scaled logits."""
    hf = {"rope_theta": 500_000.0, "tie_word_embeddings": True, **hf}
    rope = read_rope(hf, head_dim_of(hf), interleaved=True)
    return model_config(
        hf,
        (*KEYS, "use_qk_norm"),
        ropes=(rope,) * needed(hf, "num_hidden_layers"),
        qk_norm="each_head" if hf.get("use_qk_norm") else "none",
        **overrides(hf),
    )


def overrides(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields in which Cohere's families differ from Llama."""
    return {
        "block": "parallel",
        "norm": "layer",
        "norm_eps": hf.get("layer_norm_eps", 1e-5),
        "logit_scale": hf.get("logit_scale", 0.0625),
        "qkv_bias": hf.get("attention_bias", False),
        "o_bias": hf.get("attention_bias", False),
    }
