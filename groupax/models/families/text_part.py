"""The text part of models that also see images: its `config.json`. Imports no jax."""

from collections.abc import Mapping
from typing import Any

from groupax.terminal.printable import short_repr

# The kinds of text models in each kind of model that also sees images, with the class that transformers loads alone.
TEXT_PARTS: dict[str, dict[str, str]] = {
    "gemma3": {"gemma3_text": "Gemma3ForCausalLM"},
    "qwen3_5": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "qwen3_5_moe": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "mistral3": {"ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM"},
}
# Sizes that files of these text models may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    }
}
# Keys of the whole file that hold for its text part, unless that has its own.
_SHARED = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config", "torch_dtype")


def has_text_part(hf: Mapping[str, Any]) -> bool:
    """Returns whether a parsed `config.json` describes a model that also sees images, and whose text part is read."""
    return isinstance(hf.get("model_type"), str) and hf["model_type"] in TEXT_PARTS


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `config.json` of the text part alone, or that of a text model without its unused layers.

    Layers that predict several tokens ahead are neither read nor saved.

    Raises:
        ValueError: The file has no text part, or one of an unsupported kind.
    """
    if has_text_part(hf):
        hf = _text_part(hf)
    return {**hf, "num_nextn_predict_layers": 0} if hf.get("num_nextn_predict_layers") else dict(hf)


def _text_part(hf: Mapping[str, Any]) -> dict[str, Any]:
    kinds, text = TEXT_PARTS[hf["model_type"]], hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config of config.json is {short_repr(text)}; it must be an object")
    kind = text.get("model_type", next(iter(kinds)))
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(
            f"text_config of config.json has model_type={short_repr(kind)}; supported in a {hf['model_type']} model "
            f"are {', '.join(kinds)}"
        )
    architectures = hf.get("architectures") or []
    if not isinstance(architectures, list) or any("SequenceClassification" in str(name) for name in architectures):
        raise ValueError(
            f"architectures of config.json are {short_repr(architectures)}; of a {hf['model_type']} model groupax "
            "reads the text part of causal language models only"
        )
    shared = {key: hf[key] for key in _SHARED if hf.get(key) is not None}
    tied = {"tie_word_embeddings": hf["tie_word_embeddings"]} if hf.get("tie_word_embeddings") is not None else {}
    own = {key: value for key, value in text.items() if value is not None}
    return {**_DEFAULTS.get(kind, {}), **shared, **tied, **own, "model_type": kind, "architectures": [kinds[kind]]}
