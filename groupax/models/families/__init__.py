"""Readers of Hugging Face `config.json` files, by families of models. Imports no jax.

To add a family, write its reader, in the module of a family that is like it, and enter it in `FAMILIES`.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from groupax.core.settings.fields import nearest
from groupax.core.storage.model_json import validate_config
from groupax.core.terminal.printable import short_repr
from groupax.models.config import ModelConfig
from groupax.models.families import cohere, gemma, glm, gpt, gpt_oss, lfm2, llama, mistral, olmo, qwen, vision
from groupax.models.families.fields import unknown_keys
from groupax.models.vision.config import VisionConfig

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "cohere": cohere.read_cohere,
    "cohere2": cohere.read_cohere2,
    "deepseek_v3": glm.read_deepseek_v3,
    "ernie4_5": llama.read_ernie4_5,
    "exaone4": olmo.read_exaone4,
    "gemma": gemma.read_gemma,
    "gemma2": gemma.read_gemma2,
    "gemma3_text": gemma.read_gemma3,
    "glm4": glm.read_glm4,
    "glm4_moe": glm.read_glm4_moe,
    "gpt2": gpt.read_gpt2,
    "gpt_neox": gpt.read_gpt_neox,
    "gpt_oss": gpt_oss.read_gpt_oss,
    "granite": llama.read_granite,
    "granitemoe": llama.read_granitemoe,
    "hunyuan_v1_dense": llama.read_hunyuan_v1_dense,
    "lfm2": lfm2.read_lfm2,
    "lfm2_moe": lfm2.read_lfm2_moe,
    "llama": llama.read_llama,
    "llama4_text": llama.read_llama4,
    "ministral3": mistral.read_ministral3,
    "mistral": mistral.read_mistral,
    "mixtral": mistral.read_mixtral,
    "nemotron": gpt.read_nemotron,
    "olmo2": olmo.read_olmo2,
    "olmo3": olmo.read_olmo3,
    "olmoe": olmo.read_olmoe,
    "phi3": llama.read_phi3,
    "qwen2": qwen.read_qwen2,
    "qwen2_moe": qwen.read_qwen2_moe,
    "qwen3": qwen.read_qwen3,
    "qwen3_5_moe_text": qwen.read_qwen3_5_moe,
    "qwen3_5_text": qwen.read_qwen3_5,
    "qwen3_moe": qwen.read_qwen3_moe,
    "qwen3_next": qwen.read_qwen3_next,
    "seed_oss": llama.read_seed_oss,
    "smollm3": llama.read_smollm3,
    "starcoder2": gpt.read_starcoder2,
}


@dataclass(frozen=True)
class VisionFamily:
    """A family of models that also see images.

    Attributes:
        text_kinds: Kinds of its text part, the default first.
        read_text: Reader of the text part.
        read_vision: Reader of the part that sees images.
        tied: Whether its head is the embedding if a file does not say.
        may_be_flat: Whether older files have the text part's keys among those of the whole model, and newer ones may
            say in the text part that the head is the embedding.
    """

    text_kinds: tuple[str, ...]
    read_text: Callable[[Mapping[str, Any]], ModelConfig]
    read_vision: Callable[[Mapping[str, Any]], VisionConfig]
    tied: bool = False
    may_be_flat: bool = False


VISION_FAMILIES: dict[str, VisionFamily] = {
    "gemma3": VisionFamily(("gemma3_text",), gemma.read_gemma3_text, gemma.read_gemma3_vision, tied=True),
    "idefics3": VisionFamily(("llama",), llama.read_llama, vision.read_idefics3_vision),
    "qwen2_5_vl": VisionFamily(
        ("qwen2_5_vl_text",), qwen.read_qwen2_vl_text, qwen.read_qwen2_5_vl_vision, may_be_flat=True
    ),
    "qwen2_vl": VisionFamily(("qwen2_vl_text",), qwen.read_qwen2_vl_text, qwen.read_qwen2_vl_vision, may_be_flat=True),
    "qwen3_5": VisionFamily(("qwen3_5_text",), qwen.read_qwen3_5_text, qwen.read_qwen3_5_vision),
    "qwen3_5_moe": VisionFamily(("qwen3_5_moe_text",), qwen.read_qwen3_5_moe_text, qwen.read_qwen3_5_vision),
    "qwen3_vl": VisionFamily(("qwen3_vl_text",), qwen.read_qwen3_vl_text, qwen.read_qwen3_vl_vision),
    "qwen3_vl_moe": VisionFamily(("qwen3_vl_moe_text",), qwen.read_qwen3_vl_moe_text, qwen.read_qwen3_vl_vision),
    "smolvlm": VisionFamily(("llama",), llama.read_llama, vision.read_idefics3_vision),
}

# The models of which only the text part is supported: its kinds, with the class that transformers loads alone.
TEXT_PARTS: dict[str, dict[str, str]] = {
    "mistral3": {"ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM"},
    "llama4": {"llama4_text": "Llama4ForCausalLM"},
}
# Sizes that files of models that see images may leave out of the text part.
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _sizes(sizes: tuple[int, ...], **others: int) -> dict[str, int]:
    """Returns the sizes of a text part by their keys, in the order of `_SIZES`, and others."""
    return dict(zip(_SIZES, sizes, strict=False)) | others


_QWEN3_5 = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8}
_QWEN3_VL = {"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_local_experts": 60}
_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": _sizes(
        (262208, 2304, 26, 8, 4), intermediate_size=9216, head_dim=256, max_position_embeddings=131072
    ),
    "llama": _sizes((32000, 4096, 32, 32), intermediate_size=11008),
    "llama4_text": _sizes((202048, 5120, 48, 40), intermediate_size=8192),
    **dict.fromkeys(
        ("qwen2_5_vl_text", "qwen2_vl_text"),
        _sizes((152064, 8192, 80, 64, 8), intermediate_size=29568, max_position_embeddings=32768),
    ),
    "qwen3_5_moe_text": _sizes((248320, 2048, 40, 16, 2), num_local_experts=256, **_QWEN3_5),
    "qwen3_5_text": _sizes((248320, 4096, 32, 16, 4), intermediate_size=12288),
    "qwen3_vl_moe_text": _sizes(
        (151936, 2048, 24, 16, 16), intermediate_size=5632, max_position_embeddings=128000, **_QWEN3_VL
    ),
    "qwen3_vl_text": _sizes((151936, 4096, 32, 32, 32), intermediate_size=22016, max_position_embeddings=128000),
}
# The family that is nearest to a file with keys that have this word, the first that applies.
_BY_KEYS = {
    "mamba": "qwen3_next",
    "linear_": "qwen3_next",
    "lora_rank": "deepseek_v3",
    "expert": "qwen3_moe",
    "": "llama",
}
_MIXTURES = {
    *("deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe", "lfm2_moe", "llama4_text", "mixtral"),
    *("olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
}
_FEW_KEYS = 5  # of a file that says nothing of an architecture
# Numbers of layers that predict several tokens ahead.
_AHEAD = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
# Keys of a flat file that are not of its text part.
_NOT_OF_TEXT = (
    *("architectures", "image_token_id", "model_type", "text_config", "video_token_id", "vision_config"),
    *("vision_end_token_id", "vision_start_token_id", "vision_token_id"),
)
# Keys of the whole file that hold for its text part, unless that has its own.
_SHARED = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config", "torch_dtype")


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
        raise ValueError(_unsupported(hf))
    return FAMILIES[model_type](validate_config(hf))


def _unsupported(hf: Mapping[str, Any]) -> str:
    """Returns an error for an unsupported `model_type`: the nearest family, and what of the file it does not have."""
    supported = sorted([*FAMILIES, *VISION_FAMILIES, *TEXT_PARTS])
    kind, listed = str(hf.get("model_type"))[:64], f"supported are {', '.join(supported)}"
    text = f"model_type {short_repr(hf.get('model_type'))} is not supported"
    keys = " ".join(map(str, hf))
    if len(hf) < _FEW_KEYS:
        return f"{text}; {listed}{nearest(kind, supported)}"
    names = [name for name in FAMILIES if "expert" in keys or name not in _MIXTURES]
    alike = get_close_matches(kind, names, n=1) or [next(name for word, name in _BY_KEYS.items() if word in keys)]
    family = alike[0]
    text += f"; the nearest family is {family}"
    if unknown := unknown_keys(hf):
        text += f", which does not have the keys {short_repr(unknown)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            FAMILIES[family](validate_config({**hf, "model_type": family}))
        except ValueError as error:
            text += f", whose reader says: {error}"
    return f"{text}; {listed}"


def _read_with_vision(family: VisionFamily, hf: Mapping[str, Any]) -> ModelConfig:
    if hf.get("quantization_config"):
        raise ValueError("the checkpoint is quantized (quantization_config); load the unquantized weights instead")
    if family.may_be_flat:
        hf = _nested(hf)
    text = family.read_text(validate_config(text_settings(hf, family.text_kinds, family.tied)))
    images = family.read_vision(hf)
    if text.num_labels:
        raise ValueError(f"groupax does not support classifiers of {hf['model_type']} models")
    if images.num_levels > 1 + text.num_layers:
        raise ValueError(
            f"vision_config gives features to {images.num_levels - 1} layers of the decoder, which has "
            f"{text.num_layers}"
        )
    return replace(text, model_type=hf["model_type"], vision=images)


# -- the text part of models that also see images


def _nested(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a file of a family that `may_be_flat` with a text part, and whether the head is tied at the top."""
    text = hf.get("text_config")
    if text is None:
        text = {key: hf[key] for key in hf if key not in _NOT_OF_TEXT}
    elif isinstance(text, Mapping):  # which files of some versions have there too
        text = {key: text[key] for key in text if not (key in _NOT_OF_TEXT and key.endswith("_token_id"))}
    is_tied = hf.get("tie_word_embeddings") or (isinstance(text, Mapping) and text.get("tie_word_embeddings"))
    return {**hf, "text_config": text, "tie_word_embeddings": is_tied}


def has_text_part(hf: Mapping[str, Any]) -> bool:
    """Returns whether a parsed `config.json` describes a model that also sees images, and whose text part is read."""
    return isinstance(hf.get("model_type"), str) and hf["model_type"] in TEXT_PARTS


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a `config.json` without what is neither read nor saved.

    That is layers that predict several tokens ahead, and the part that sees images if only the text part is supported.

    Raises:
        ValueError: The file has no text part, or one of an unsupported kind.
    """
    if has_text_part(hf):
        kinds = TEXT_PARTS[hf["model_type"]]
        settings, tied = text_settings(hf, tuple(kinds)), hf["text_config"].get("tie_word_embeddings")
        own = {} if tied is None else {"tie_word_embeddings": tied}
        hf = {**settings, **own, "architectures": [kinds[settings["model_type"]]]}
    text = hf.get("text_config")
    return _without_ahead({**hf, "text_config": _without_ahead(text)} if isinstance(text, Mapping) else hf)


def _without_ahead(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**hf, **{key: 0 for key in _AHEAD if hf.get(key)}}


def text_settings(hf: Mapping[str, Any], kinds: tuple[str, ...], tied: bool = False) -> dict[str, Any]:
    """Returns the settings of the text part of a model that also sees images, as those of a model of its kind.

    Args:
        hf: Parsed `config.json` of the whole model.
        kinds: Supported kinds of text models, the family's default first.
        tied: Whether the family's head is the embedding if the file does not say. As in transformers, it is up to the
            whole model, not to its text part.

    Raises:
        ValueError: The file has no text part, or one of an unsupported kind.
    """
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config of config.json is {short_repr(text)}; it must be an object")
    kind = text.get("model_type", kinds[0])
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(
            f"text_config of config.json has model_type={short_repr(kind)}; supported in a {hf['model_type']} model "
            f"are {', '.join(kinds)}"
        )
    architectures = hf.get("architectures") or []
    if not isinstance(architectures, list) or any("SequenceClassification" in str(name) for name in architectures):
        raise ValueError(
            f"architectures of config.json are {short_repr(architectures)}; of {hf['model_type']} models groupax reads "
            "causal language models only"
        )
    shared = {key: hf[key] for key in _SHARED if hf.get(key) is not None}
    own = {key: value for key, value in text.items() if value is not None and key != "architectures"}
    whole = hf.get("tie_word_embeddings")
    own["tie_word_embeddings"] = tied if whole is None else whole
    return {**_DEFAULTS.get(kind, {}), **shared, **own, "model_type": kind}
