"""Seed-OSS."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import model_config

KEYS = ("attention_bias", "attention_out_bias", "mlp_bias", "residual_dropout")


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Seed-OSS: Llama with biases of the query, key and value projections by default, and heads of 128 dims."""
    hf = {"head_dim": 128, **hf}
    return model_config(
        hf,
        KEYS,
        qkv_bias=hf.get("attention_bias", True),
        o_bias=hf.get("attention_out_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
    )
