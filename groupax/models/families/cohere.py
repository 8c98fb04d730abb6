"""Cohere's families: Command R and Aya 23, Command R7B, Command A and Aya Expanse."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import (
    biases,
    every_nth_is_full,
    head_dim_of,
    layer_windows,
    model_config,
    read_rope,
    require,
    sliding_layers,
)

# Keys of Cohere 2's released files whose values the architecture fixes.
FIXED = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "use_qk_norm": False,
}


def read_cohere(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Cohere: attention and feed-forward in parallel after one layer norm, and scaled logits."""
    hf = {"rope_theta": 500_000.0, "tie_word_embeddings": True, **hf}
    rope = read_rope(hf, head_dim_of(hf), interleaved=True)
    qk_norm = "each_head" if hf.get("use_qk_norm") else "none"
    return model_config(hf, ropes=rope, qk_norm=qk_norm, **_parallel(hf))


def read_cohere2(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Cohere 2: Cohere with sliding windows; layers without a window have no positions."""
    hf = {"tie_word_embeddings": True, **hf}
    require(hf, FIXED)
    windows = layer_windows(sliding_layers(hf, every_nth_is_full(hf, 4)), hf.get("sliding_window", 4096))
    rope = read_rope(hf, head_dim_of(hf), interleaved=True)
    ropes = tuple(None if window is None else rope for window in windows)
    return model_config(hf, ropes=ropes, windows=windows, **_parallel(hf))


def _parallel(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "block": "parallel",
        "norm": "layer",
        "norm_eps": hf.get("layer_norm_eps", 1e-5),
        "logit_scale": hf.get("logit_scale", 0.0625),
        **biases(hf),
    }
