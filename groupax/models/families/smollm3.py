"""SmolLM 3."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import head_dim_of, layer_windows, model_config, needed, sliding_layers
from groupax.models.families.rope import read_rope

KEYS = (
    "attention_bias",
    "layer_types",
    "max_window_layers",
    "mlp_bias",
    "no_rope_layer_interval",
    "no_rope_layers",
    "sliding_window",
    "use_sliding_window",
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads SmolLM 3: Llama in which every fourth layer, or those that the file lists, have no positions."""
    hf = {"rope_theta": 2e6, "tie_word_embeddings": True, **hf}
    rope, num_layers = read_rope(hf, head_dim_of(hf)), needed(hf, "num_hidden_layers")
    interval = hf.get("no_rope_layer_interval", 4)
    # a layer with positions has a 1 in `no_rope_layers`
    has_rope = hf.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(num_layers)]
    if len(has_rope) < num_layers:
        raise ValueError(f"config.json lists {len(has_rope)} no_rope_layers of {num_layers} layers")
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    bias = hf.get("attention_bias", False)
    return model_config(
        hf,
        KEYS,
        ropes=tuple(rope if each else None for each in has_rope[:num_layers]),
        windows=layer_windows(sliding_layers(hf, lambda index: not has_rope[index]), window),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.get("mlp_bias", False),
    )
