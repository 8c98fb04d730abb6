"""Gemma 3, the text model."""

import warnings
from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import every_nth_is_full, head_dim_of, layer_windows, model_config, sliding_layers
from groupax.models.families.gemma2 import KEYS, overrides, with_defaults
from groupax.models.families.rope import read_ropes_by_kind


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Gemma 3: Gemma 2 with norms of queries and keys, and separate rotary embeddings for sliding layers.

    Its scores have no softcap, as in transformers.
    """
    hf = without_softcap(with_defaults(hf), "attn_logit_softcapping")
    sliding = sliding_layers(hf, every_nth_is_full(hf, 6))
    thetas = hf.get("rope_local_base_freq", 1e4), hf.get("rope_theta", 1e6)
    local, full = read_ropes_by_kind(hf, head_dim_of(hf), *thetas)
    return model_config(
        hf,
        (*KEYS, "rope_local_base_freq", "sliding_window_pattern"),
        ropes=tuple(local if slides else full for slides in sliding),
        windows=layer_windows(sliding, hf.get("sliding_window", 4096)),
        qk_norm="head",
        **overrides(hf),
    )


def read_text_part(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part of a Gemma 3 that also sees images, whose logits have no softcap, as in transformers."""
    return read_config(without_softcap(hf, "final_logit_softcapping"))


def without_softcap(hf: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns a parsed `config.json` without a softcap that the model does not apply, after a warning."""
    if hf.get(key) is not None:
        warnings.warn(
            f"config.json has {key}={hf[key]}, which transformers' Gemma 3 does not apply; groupax does not either",
            stacklevel=4,
        )
    return {**hf, key: None}
