"""Llama 2, 3, 3.1 and 3.2."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import common_fields


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """RMS norms, rotary embeddings (plain or Llama-3 scaled), SwiGLU; biases only where the file asks for them."""
    attention_bias = hf.get("attention_bias", False)
    return ModelConfig(
        **common_fields(hf, read_elsewhere=("attention_bias", "mlp_bias")),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=hf.get("mlp_bias", False),
    )
