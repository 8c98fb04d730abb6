"""OLMo 3."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import every_nth_is_full, head_dim_of, layer_windows, sliding_layers
from groupax.models.families.olmo2 import olmo2_config
from groupax.models.families.rope import read_ropes_by_kind


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads OLMo 3: OLMo 2 with a sliding window in three of four layers, whose rotary embeddings are not scaled."""
    theta = hf.get("rope_theta") or 500_000.0
    sliding = sliding_layers(hf, every_nth_is_full({}, 4))
    local, full = read_ropes_by_kind(hf, head_dim_of(hf), theta, theta)
    return olmo2_config(
        hf,
        ("sliding_window", "layer_types"),
        ropes=tuple(local if slides else full for slides in sliding),
        windows=layer_windows(sliding, hf.get("sliding_window", 4096)),
    )
