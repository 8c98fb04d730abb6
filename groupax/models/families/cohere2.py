"""Command R7B, Command A and Aya Expanse (Cohere 2)."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.cohere import KEYS, overrides
from groupax.models.families.fields import (
    every_nth_is_full,
    head_dim_of,
    layer_windows,
    model_config,
    require,
    sliding_layers,
)
from groupax.models.families.rope import read_rope

# Keys of released files whose values the architecture fixes.
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


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Cohere 2: Cohere with sliding windows; layers without a window have no positions."""
    hf = {"tie_word_embeddings": True, **hf}
    for key, value in FIXED.items():
        require(hf, key, value)
    sliding = sliding_layers(hf, every_nth_is_full(hf, 4))
    windows = layer_windows(sliding, hf.get("sliding_window", 4096))
    rope = read_rope(hf, head_dim_of(hf), interleaved=True)
    return model_config(
        hf,
        (*KEYS, *FIXED, "sliding_window", "sliding_window_pattern", "layer_types"),
        ropes=tuple(None if window is None else rope for window in windows),
        windows=windows,
        **overrides(hf),
    )
