"""The text part of models that also see images, in their `config.json`. Imports no jax."""

from collections.abc import Mapping
from typing import Any

from groupax.terminal.printable import short_repr

# The models of which only the text part is supported: its kinds, with the class that transformers loads alone.
TEXT_PARTS: dict[str, dict[str, str]] = {
    "mistral3": {"ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM"},
    "llama4": {"llama4_text": "Llama4ForCausalLM"},
}
# Sizes that files of models that see images may leave out of the text part.
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
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama4_text": {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
    },
    "qwen3_5_moe_text": {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
    },
    "qwen3_5_text": {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "qwen3_vl_moe_text": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_local_experts": 60,
    },
    "qwen3_vl_text": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 128000,
    },
}
# Numbers of layers that predict several tokens ahead.
_AHEAD = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
# Keys of the whole file that hold for its text part, unless that has its own.
_SHARED = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config", "torch_dtype")


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
        hf = _text_part(hf)
    text = hf.get("text_config")
    return _without_ahead({**hf, "text_config": _without_ahead(text)} if isinstance(text, Mapping) else hf)


def _without_ahead(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**hf, **{key: 0 for key in _AHEAD if hf.get(key)}}


def _text_part(hf: Mapping[str, Any]) -> dict[str, Any]:
    kinds = TEXT_PARTS[hf["model_type"]]
    text = text_settings(hf, tuple(kinds))
    tied = (hf.get("text_config") or {}).get("tie_word_embeddings")
    tied = {} if tied is None else {"tie_word_embeddings": tied}
    return {**text, **tied, "architectures": [kinds[text["model_type"]]]}


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
