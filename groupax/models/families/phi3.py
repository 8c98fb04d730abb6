"""Phi 3, 3.5 and 4 (dense)."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import head_dim_of, model_config, needed
from groupax.models.families.rope import read_rope


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Phi 3: Llama with fused projections, a sliding window in all layers, and partial rotary embeddings."""
    hf = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **hf}
    # both are older names of longrope
    rope = read_rope(hf, head_dim_of(hf), kinds={"su": "longrope", "yarn": "longrope"}, partial=True)
    num_layers = needed(hf, "num_hidden_layers")
    windows = (hf.get("sliding_window"),) * num_layers
    fused = {"fused_qkv": True, "fused_gate_up": True}
    return model_config(hf, ("sliding_window",), ropes=(rope,) * num_layers, windows=windows, **fused)
