"""Readers of Hugging Face `config.json` files, one module per family of models. Imports no jax."""

from collections.abc import Callable, Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families import (
    cohere,
    cohere2,
    deepseek_v3,
    exaone4,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    granite,
    lfm2,
    lfm2_moe,
    llama,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from groupax.models.families.text_part import TEXT_PARTS, has_text_part, text_config
from groupax.storage.model_json import validate_config
from groupax.terminal.printable import short_repr

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "cohere": cohere.read_config,
    "cohere2": cohere2.read_config,
    "deepseek_v3": deepseek_v3.read_config,
    "exaone4": exaone4.read_config,
    "gemma2": gemma2.read_config,
    "gemma3_text": gemma3.read_config,
    "glm4": glm4.read_config,
    "glm4_moe": glm4_moe.read_config,
    "granite": granite.read_config,
    "lfm2": lfm2.read_config,
    "lfm2_moe": lfm2_moe.read_config,
    "llama": llama.read_config,
    "ministral3": ministral3.read_config,
    "mistral": mistral.read_config,
    "mixtral": mixtral.read_config,
    "olmo2": olmo2.read_config,
    "olmo3": olmo3.read_config,
    "phi3": phi3.read_config,
    "qwen2": qwen2.read_config,
    "qwen3": qwen3.read_config,
    "qwen3_5_moe_text": qwen3_5.read_moe_config,
    "qwen3_5_text": qwen3_5.read_config,
    "qwen3_moe": qwen3_moe.read_config,
    "qwen3_next": qwen3_next.read_config,
    "seed_oss": seed_oss.read_config,
    "smollm3": smollm3.read_config,
}

# The family that is most like one that is not supported: of the same makers, or else of the same kind.
NEAREST = {
    "deepseek_v2": "deepseek_v3",
    "glm4_moe_lite": "glm4_moe",
    "gpt_oss": "qwen3_moe",
    "llama4": "llama",
    "llama4_text": "llama",
    "nemotron_h": "qwen3_moe",
    "qwen3_vl": "qwen3",
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Returns the architecture that a parsed `config.json` describes, of a model that also sees images its text part.

    Raises:
        ValueError: The `model_type` is missing or unsupported, a value is missing or invalid, or the file requests
            something that groupax does not support for its family. Nothing is ignored silently.
    """
    if has_text_part(hf):
        hf = text_config(hf)
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(sorted([*FAMILIES, *TEXT_PARTS]))
        raise ValueError(
            f"model_type {short_repr(model_type)} is not supported{_nearest(model_type)}; supported are {supported}"
        )
    return FAMILIES[model_type](validate_config(hf))


def _nearest(model_type: Any) -> str:
    """Returns the supported family that is nearest to one that is not, for an error, or an empty text."""
    found = NEAREST.get(model_type) if isinstance(model_type, str) else None
    return "" if found is None else f" (nearest is {found})"
