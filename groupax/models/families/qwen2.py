"""Qwen 2 and 2.5."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import layer_windows, model_config, sliding_layers

WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen 2: Llama with biases of the query, key and value projections, whatever the file says."""
    return model_config(hf, WINDOW_KEYS, windows=windows(hf), qkv_bias=True)


def windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Returns the windows of all layers: sliding from layer `max_window_layers` on, if they are enabled."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    sliding = sliding_layers(hf, lambda index: index >= hf.get("max_window_layers", 28))
    return layer_windows(sliding, window)
