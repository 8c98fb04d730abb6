"""Granite (dense)."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import model_config

KEYS = (
    "attention_bias",
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "mlp_bias",
    "residual_multiplier",
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Granite: Llama with multipliers of embeddings, attention scores, residuals and logits."""
    bias = hf.get("attention_bias", False)
    return model_config(
        hf,
        KEYS,
        attention_scale=float(hf.get("attention_multiplier", 1.0)),
        embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / hf.get("logits_scaling", 1.0),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.get("mlp_bias", False),
    )
