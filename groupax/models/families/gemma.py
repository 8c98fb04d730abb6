"""Gemma 1 to 3, text and images."""

import warnings
from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import (
    biases,
    every_nth_is_full,
    head_dim_of,
    layer_windows,
    model_config,
    read_ropes_by_kind,
    require,
    sliding_layers,
)
from groupax.models.families.vision import SIGLIP, siglip_tower, vision_settings
from groupax.models.vision.config import AveragePool, VisionConfig


def read_gemma(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Gemma 1: Llama with centered norms, scaled embeddings, and a GELU that is approximate whatever its name."""
    activation = hf.get("hidden_act") or "gelu"
    activation = "gelu_pytorch_tanh" if activation == "gelu" else activation
    require(hf, {"hidden_activation": activation})
    hf = _with_defaults({"max_position_embeddings": 8192, **hf, "hidden_activation": activation})
    return model_config(hf, norm="zero_centered_rms", embedding_scale=hf.get("hidden_size", 1) ** 0.5, **biases(hf))


def read_gemma2(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Gemma 2: sandwich norms, softcaps, and a sliding window in every other layer."""
    hf = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **_with_defaults(hf)}
    sliding = sliding_layers(hf, lambda index: index % 2 == 0)
    return model_config(hf, windows=layer_windows(sliding, hf.get("sliding_window", 4096)), **_overrides(hf))


def read_gemma3(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Gemma 3: Gemma 2 with norms of queries and keys, and separate rotary embeddings for sliding layers.

    Its scores have no softcap, as in transformers.
    """
    hf = _without_softcap(_with_defaults(hf), "attn_logit_softcapping")
    sliding = sliding_layers(hf, every_nth_is_full(hf, 6))
    thetas = hf.get("rope_local_base_freq", 1e4), hf.get("rope_theta", 1e6)
    local, full = read_ropes_by_kind(hf, head_dim_of(hf), *thetas)
    return model_config(
        hf,
        ropes=tuple(local if slides else full for slides in sliding),
        windows=layer_windows(sliding, hf.get("sliding_window", 4096)),
        qk_norm="head",
        **_overrides(hf),
    )


def read_gemma3_text(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the text part of a Gemma 3 that also sees images, whose logits have no softcap, as in transformers."""
    return read_gemma3(_without_softcap(hf, "final_logit_softcapping"))


def read_gemma3_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads SigLIP over a whole image, and a projector from averages of squares of patches (arXiv:2503.19786)."""
    defaults = {**SIGLIP, "hidden_size": 768, "num_attention_heads": 12, "patch_size": 16, "vision_use_head": True}
    settings = vision_settings(hf, ("siglip_vision_model",), defaults)
    if settings["vision_use_head"]:
        raise ValueError(
            "vision_config has vision_use_head=true, as it does without this key; groupax supports only towers without "
            "the pooling head, which nothing reads and released models lack"
        )
    tower = siglip_tower(settings)
    features = hf.get("mm_tokens_per_image", 256)
    side, patches = int(features**0.5), tower.positions_per_side
    assert patches is not None, "SigLIP has a table of positions"
    if side < 1 or side**2 != features or patches % side:
        raise ValueError(
            f"config.json has mm_tokens_per_image={features}; groupax supports squares of numbers that divide the "
            f"{patches} patches along a side of an image"
        )
    image_token = hf.get("image_token_index", hf.get("image_token_id", 262144))
    return VisionConfig(
        tower=tower,
        projector=AveragePool(patches // side, tower.norm_eps),
        image_token_id=image_token,
        placeholder_ids=(image_token,),
        names="gemma3",
        text_prefix="model.language_model.",
        sees_whole_images=True,
    )


def _with_defaults(hf: Mapping[str, Any]) -> dict[str, Any]:
    require(hf, {"use_bidirectional_attention": False})
    activation = hf.get("hidden_activation") or "gelu_pytorch_tanh"
    return {"head_dim": 256, "tie_word_embeddings": True, **hf, "hidden_act": activation}


def _overrides(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields in which Gemma 2 and 3 differ from Llama."""
    return {
        "block": "sandwich_norm",
        "norm": "zero_centered_rms",
        "attention_scale": float(hf.get("query_pre_attn_scalar", 256)) ** -0.5,
        "attention_softcap": hf.get("attn_logit_softcapping"),
        "logit_softcap": hf.get("final_logit_softcapping"),
        "embedding_scale": float(hf.get("hidden_size", 1)) ** 0.5,
        **biases(hf),
    }


def _without_softcap(hf: Mapping[str, Any], key: str) -> dict[str, Any]:
    if hf.get(key) is not None:
        warnings.warn(
            f"config.json has {key}={hf[key]}, which transformers' Gemma 3 does not apply; groupax does not either",
            stacklevel=4,
        )
    return {**hf, key: None}
