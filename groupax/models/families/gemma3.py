"""Gemma 3, the text model."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig, Rope
from groupax.models.families.fields import head_dim_of, layer_windows, model_config, sliding_layers
from groupax.models.families.gemma2 import KEYS, differs, with_defaults
from groupax.models.families.rope import read_rope, rope_table


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Gemma 2 with norms on queries and keys, and with rotary embeddings of their own where windows slide."""
    hf = with_defaults(hf)
    pattern = hf.get("sliding_window_pattern") or 6
    sliding = sliding_layers(hf, lambda index: (index + 1) % pattern != 0)
    near, far = _ropes(hf)
    return model_config(
        hf,
        (*KEYS, "rope_local_base_freq", "sliding_window_pattern"),
        ropes=tuple(near if slides else far for slides in sliding),
        windows=layer_windows(sliding, hf.get("sliding_window", 4096)),
        qk_norm="head",
        **differs(hf),
    )


def _ropes(hf: Mapping[str, Any]) -> tuple[Rope, Rope]:
    """Of layers with a sliding window, and of the others."""
    head_dim, near_theta, theta = head_dim_of(hf), hf.get("rope_local_base_freq", 1e4), hf.get("rope_theta", 1e6)
    by_kind = rope_table(hf) if hf.get("rope_parameters") else None
    if by_kind is None:
        near, far = {"rope_theta": near_theta}, {"rope_theta": theta, **(hf.get("rope_scaling") or {})}
    else:
        near = {"rope_theta": near_theta, **(by_kind.get("sliding_attention") or {})}
        far = {"rope_theta": theta, **(by_kind.get("full_attention") or {})}
    return read_rope(hf, head_dim, near), read_rope(hf, head_dim, far)
