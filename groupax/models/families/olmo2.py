"""OLMo 2."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import model_config


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads OLMo 2: norms after attention and feed-forward, and over all query and all key heads of a token."""
    return olmo2_config(hf)


def olmo2_config(hf: Mapping[str, Any], reads: tuple[str, ...] = (), **overrides: Any) -> ModelConfig:
    """Returns the architecture of OLMo 2 or of a family that is like it (see `fields.model_config`)."""
    hf = {"rms_norm_eps": 1e-5, **hf}
    bias = hf.get("attention_bias", False)
    fields = {"block": "post_norm", "qk_norm": "all_heads", "qkv_bias": bias, "o_bias": bias}
    return model_config(hf, ("attention_bias", *reads), **fields, **overrides)
