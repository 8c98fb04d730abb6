"""Mistral."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import model_config


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Mistral: Llama with a sliding window in all layers, of 4,096 positions by default."""
    windows = (hf.get("sliding_window", 4096),) * hf.get("num_hidden_layers", 0)
    return model_config(hf, ("sliding_window",), windows=windows)
