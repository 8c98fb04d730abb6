"""Qwen 3 (dense)."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import model_config
from groupax.models.families.qwen2 import WINDOW_KEYS, windows


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen 3: Llama with RMS norms of each head's queries and keys."""
    hf = {**hf, "head_dim": hf.get("head_dim") or 128}  # the family's default, which is not hidden_size / num_heads
    bias = hf.get("attention_bias", False)
    reads = ("attention_bias", *WINDOW_KEYS)
    return model_config(hf, reads, windows=windows(hf), qkv_bias=bias, o_bias=bias, qk_norm="head")
