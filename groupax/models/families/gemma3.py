"""Gemma 3, the text model."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig, Rope
from groupax.models.families.fields import head_dim_of, layer_windows, model_config, sliding_layers
from groupax.models.families.gemma2 import KEYS, overrides, with_defaults
from groupax.models.families.rope import read_rope, rope_table


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Gemma 3: Gemma 2 with norms of queries and keys, and separate rotary embeddings for sliding layers."""
    hf = with_defaults(hf)
    pattern = hf.get("sliding_window_pattern") or 6
    sliding = sliding_layers(hf, lambda index: (index + 1) % pattern != 0)
    local, full = _ropes(hf)
    return model_config(
        hf,
        (*KEYS, "rope_local_base_freq", "sliding_window_pattern"),
        ropes=tuple(local if slides else full for slides in sliding),
        windows=layer_windows(sliding, hf.get("sliding_window", 4096)),
        qk_norm="head",
        **overrides(hf),
    )


def _ropes(hf: Mapping[str, Any]) -> tuple[Rope, Rope]:
    """Returns the rotary embeddings of layers with a sliding window, and of the others."""
    head_dim, local_theta, theta = head_dim_of(hf), hf.get("rope_local_base_freq", 1e4), hf.get("rope_theta", 1e6)
    by_kind = rope_table(hf) if hf.get("rope_parameters") else None
    if by_kind is None:
        local, full = {"rope_theta": local_theta}, {"rope_theta": theta, **(hf.get("rope_scaling") or {})}
    else:
        local = {"rope_theta": local_theta, **(by_kind.get("sliding_attention") or {})}
        full = {"rope_theta": theta, **(by_kind.get("full_attention") or {})}
    return read_rope(hf, head_dim, local), read_rope(hf, head_dim, full)
