"""Ministral 3."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig, QueryGrowth
from groupax.models.families.fields import head_dim_of, model_config, needed
from groupax.models.families.rope import read_rope, rope_table

# The table of rotary parameters of a file without one.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Ministral 3: Mistral, without a window by default, whose queries grow with their position."""
    hf = {"head_dim": 128, "rms_norm_eps": 1e-5, **hf}
    num_layers = needed(hf, "num_hidden_layers")
    table = dict(rope_table(hf) or ROPE)
    slope, period = table.pop("llama_4_scaling_beta", None), table.get("original_max_position_embeddings")
    if slope is None or period is None:
        raise ValueError(
            "rope_parameters of a ministral3 model lacks llama_4_scaling_beta or original_max_position_embeddings"
        )
    table.pop("max_position_embeddings", None)  # a copy of that of the file
    return model_config(
        hf,
        ("sliding_window",),
        ropes=(read_rope(hf, head_dim_of(hf), table),) * num_layers,
        windows=(hf.get("sliding_window"),) * num_layers,
        query_growth=QueryGrowth(slope, period),
    )
