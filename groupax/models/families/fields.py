"""Reading `config.json` strictly: what the families have in common."""

import warnings
from collections.abc import Mapping
from typing import Any

from groupax.models.config import Llama3Rope

# Keys that say nothing about what the forward pass computes.
METADATA = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "classifier_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "hidden_act",
        "id2label",
        "initializer_range",
        "label2id",
        "layer_types",
        "max_window_layers",
        "model_type",
        "num_labels",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_sliding_window",
    ]
)


def common_fields(hf: Mapping[str, Any], read_elsewhere: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of `ModelConfig` that every family here writes under the same names.

    Args:
        hf: the parsed `config.json`.
        read_elsewhere: further keys that the calling family interprets itself.
    """
    sizes = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "ffn_size": "intermediate_size",
    }
    missing = [key for key in sizes.values() if key not in hf]
    if missing:
        raise ValueError(f"config.json of a {hf['model_type']} model lacks {', '.join(missing)}")
    read = {*sizes.values(), "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"}
    _account_for_all_keys(hf, read | {"tie_word_embeddings"} | set(read_elsewhere))

    require(hf, "hidden_act", "silu")
    require(hf, "pretraining_tp", 1)
    require(hf, "use_sliding_window", False)
    if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
        raise ValueError(f"layer_types {hf['layer_types']} asks for sliding-window attention, which is not supported")

    num_heads = hf["num_attention_heads"]
    theta, scaling = rope(hf)
    return {
        "model_type": hf["model_type"],
        **{ours: int(hf[theirs]) for ours, theirs in sizes.items()},
        "num_kv_heads": hf.get("num_key_value_heads") or num_heads,
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // num_heads,
        "max_positions": hf.get("max_position_embeddings", 2048),
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": hf.get("tie_word_embeddings", False),
        "num_labels": _num_labels(hf),
    }


def _num_labels(hf: Mapping[str, Any]) -> int:
    """Of a sequence classifier, else 0. A file without labels means transformers' default of two."""
    architectures = hf.get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        return 0
    return len(hf.get("id2label") or ()) or int(hf.get("num_labels") or 2)


def require(hf: Mapping[str, Any], key: str, supported: Any) -> None:
    """Refuse a config whose `key` is set to anything but `supported` (absent and None pass)."""
    if hf.get(key) not in (None, supported):
        raise ValueError(
            f"config.json has {key}={hf[key]!r}; groupax supports only {supported!r} for {hf['model_type']}"
        )


def rope(hf: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Base frequency and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta", hf.get("rope_theta", 10_000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3":
        return theta, Llama3Rope(
            factor=parameters["factor"],
            low_freq_factor=parameters["low_freq_factor"],
            high_freq_factor=parameters["high_freq_factor"],
            original_max_positions=parameters["original_max_position_embeddings"],
        )
    raise ValueError(f"rope type {kind!r} is not supported; supported are 'default' and 'llama3'")


def _account_for_all_keys(hf: Mapping[str, Any], read: set[str]) -> None:
    if hf.get("quantization_config"):
        raise ValueError("the checkpoint is quantized (quantization_config); load the unquantized weights instead")
    unknown = sorted(key for key, value in hf.items() if key not in read | METADATA and value not in (None, False))
    if unknown:
        warnings.warn(f"config.json keys that groupax does not know and does not apply: {unknown}", stacklevel=5)
