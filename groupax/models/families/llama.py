"""Llama 2, 3, 3.1 and 3.2."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import model_config


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Llama: RMS norms, rotary embeddings and SwiGLU, with biases if the file says so."""
    bias = hf.get("attention_bias", False)
    mlp_bias = hf.get("mlp_bias", False)
    return model_config(hf, ("attention_bias", "mlp_bias"), qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
