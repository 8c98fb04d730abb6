"""Qwen 3 (dense)."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import common_fields


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Llama with RMS norms on each head's queries and keys."""
    attention_bias = hf.get("attention_bias", False)
    fields = common_fields(hf, read_elsewhere=("attention_bias",))
    if not hf.get("head_dim"):
        fields["head_dim"] = 128  # the family's default, which is not hidden_size / num_heads
    return ModelConfig(**fields, qkv_bias=attention_bias, o_bias=attention_bias, qk_norm=True)
