"""Qwen 2 and 2.5."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import common_fields


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Llama with biases on the query, key and value projections, whatever the file says."""
    return ModelConfig(**common_fields(hf), qkv_bias=True)
