"""EXAONE 4."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import every_nth_is_full, head_dim_of, layer_windows, model_config, sliding_layers
from groupax.models.families.rope import read_rope


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads EXAONE 4: norms after attention and feed-forward, and of each head's queries and keys.

    Where some layers have a sliding window, the others have no positions.
    """
    hf = {"rms_norm_eps": 1e-5, **hf}
    window = hf.get("sliding_window", 4096)
    sliding = sliding_layers(hf, (lambda _: False) if window is None else every_nth_is_full(hf, 4))
    rope = read_rope(hf, head_dim_of(hf))
    return model_config(
        hf,
        ("sliding_window", "sliding_window_pattern", "layer_types"),
        block="post_norm",
        qk_norm="head",
        ropes=tuple(rope if window is None or slides else None for slides in sliding),
        windows=layer_windows(sliding, window),
    )
