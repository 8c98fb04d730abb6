"""Readers of Hugging Face `config.json` files, one module per family of models. Imports no jax."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families import (
    cohere,
    cohere2,
    deepseek_v3,
    exaone4,
    gemma2,
    gemma3,
    gemma3_vision,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    idefics3,
    lfm2,
    lfm2_moe,
    llama,
    llama4,
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
    qwen3_vl,
    seed_oss,
    smollm3,
)
from groupax.models.families.text_part import TEXT_PARTS, has_text_part, text_config, text_settings
from groupax.models.vision.config import VisionConfig
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
    "gpt_oss": gpt_oss.read_config,
    "granite": granite.read_config,
    "lfm2": lfm2.read_config,
    "lfm2_moe": lfm2_moe.read_config,
    "llama": llama.read_config,
    "llama4_text": llama4.read_config,
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


@dataclass(frozen=True)
class VisionFamily:
    """A family of models that also see images.

    Attributes:
        text_kinds: Kinds of its text part, the default first.
        read_text: Reader of the text part.
        read_vision: Reader of the part that sees images.
        tied: Whether its head is the embedding if a file does not say.
    """

    text_kinds: tuple[str, ...]
    read_text: Callable[[Mapping[str, Any]], ModelConfig]
    read_vision: Callable[[Mapping[str, Any]], VisionConfig]
    tied: bool = False


VISION_FAMILIES: dict[str, VisionFamily] = {
    "gemma3": VisionFamily(("gemma3_text",), gemma3.read_text_part, gemma3_vision.read_vision, tied=True),
    "idefics3": VisionFamily(("llama",), llama.read_config, idefics3.read_vision),
    "qwen3_5": VisionFamily(("qwen3_5_text",), qwen3_5.read_text, qwen3_5.read_vision),
    "qwen3_5_moe": VisionFamily(("qwen3_5_moe_text",), qwen3_5.read_moe_text, qwen3_5.read_vision),
    "qwen3_vl": VisionFamily(("qwen3_vl_text",), qwen3_vl.read_text, qwen3_vl.read_vision),
    "qwen3_vl_moe": VisionFamily(("qwen3_vl_moe_text",), qwen3_vl.read_moe_text, qwen3_vl.read_vision),
    "smolvlm": VisionFamily(("llama",), llama.read_config, idefics3.read_vision),
}

_MAKER = re.compile(r"\A[a-z]+")  # the letters that a family's name begins with
# For families of makers without a supported one, the family that is most like them.
NEAREST = {
    "ernie4_5": "llama",
    "ernie4_5_moe": "qwen3_moe",
    "hunyuan_v1_dense": "qwen3",
    "hunyuan_v1_moe": "qwen3_moe",
    "internvl": "qwen3_vl",
    "kimi_k2": "deepseek_v3",
    "kimi_vl": "qwen3_vl",
    "llava": "idefics3",
    "minimax_m2": "qwen3_moe",
    "nemotron": "llama",
    "nemotron_h": "qwen3_next",
    "paligemma": "gemma3",
    "pixtral": "mistral3",
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Returns the architecture that a parsed `config.json` describes.

    Raises:
        ValueError: The `model_type` is missing or unsupported, a value is missing or invalid, or the file requests
            something that groupax does not support for its family. Nothing is ignored silently.
    """
    if has_text_part(hf):
        hf = text_config(hf)
    model_type = hf.get("model_type")
    if isinstance(model_type, str) and model_type in VISION_FAMILIES:
        return _read_with_vision(VISION_FAMILIES[model_type], validate_config(hf))
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(sorted([*FAMILIES, *VISION_FAMILIES, *TEXT_PARTS]))
        raise ValueError(
            f"model_type {short_repr(model_type)} is not supported{_nearest(model_type)}; supported are {supported}"
        )
    return FAMILIES[model_type](validate_config(hf))


def _read_with_vision(family: VisionFamily, hf: Mapping[str, Any]) -> ModelConfig:
    if hf.get("quantization_config"):
        raise ValueError("the checkpoint is quantized (quantization_config); load the unquantized weights instead")
    text = family.read_text(validate_config(text_settings(hf, family.text_kinds, family.tied)))
    vision = family.read_vision(hf)
    if text.num_labels:
        raise ValueError(f"groupax does not support classifiers of {hf['model_type']} models")
    if vision.num_levels > 1 + text.num_layers:
        raise ValueError(
            f"vision_config gives features to {vision.num_levels - 1} layers of the decoder, which has "
            f"{text.num_layers}"
        )
    return replace(text, model_type=hf["model_type"], vision=vision)


def _nearest(model_type: Any) -> str:
    """Returns the supported family that is nearest to one that is not, for an error, or an empty text.

    It is that of a table, or else the one of the same maker whose name is most alike.
    """
    if not isinstance(model_type, str):
        return ""
    newest_first = sorted([*FAMILIES, *VISION_FAMILIES, *TEXT_PARTS], reverse=True)
    same = [each for each in newest_first if _MAKER.findall(each) == _MAKER.findall(model_type)]
    likest = max(same, key=lambda each: SequenceMatcher(None, each, model_type[:64]).ratio(), default=None)
    found = NEAREST.get(model_type, likest)
    return "" if found is None else f" (nearest is {found})"
