"""Strict reading of `config.json`: the keys that all families share."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args

from groupax.models.config import Activation, LongRope, ModelConfig
from groupax.models.families.rope import read_rope
from groupax.terminal.printable import short_repr

# Keys that do not affect the forward pass.
METADATA = frozenset(
    [
        "_name_or_path",
        "_sliding_window_pattern",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "classifier_dropout",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "model_type",
        "num_labels",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "resid_pdrop",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
}
_READ = frozenset(
    [
        *_SIZES.values(),
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "pretraining_tp",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
    ]
)


def model_config(hf: Mapping[str, Any], reads: tuple[str, ...] = (), **overrides: Any) -> ModelConfig:
    """Returns the architecture of a Llama-like model.

    Args:
        hf: Parsed `config.json`.
        reads: Further keys that the calling family interprets itself.
        overrides: Fields of `ModelConfig` that differ from Llama's.
    """
    missing = [key for key in _SIZES.values() if key not in hf]
    if missing:
        raise ValueError(f"config.json of a {hf['model_type']} model lacks {', '.join(missing)}")
    _account_for_all_keys(hf, _READ | set(reads))
    require(hf, "pretraining_tp", 1)
    if "layer_types" not in reads and any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
        raise ValueError(f"layer_types {short_repr(hf['layer_types'])} is not supported for {hf['model_type']}")
    activation = hf.get("hidden_act") or "silu"
    if activation not in get_args(Activation):
        supported = ", ".join(get_args(Activation))
        raise ValueError(f"config.json has hidden_act={short_repr(activation)}; supported are {supported}")

    num_layers, num_heads = hf["num_hidden_layers"], hf["num_attention_heads"]
    head_dim = head_dim_of(hf)
    ropes = overrides.pop("ropes", None) or (read_rope(hf, head_dim),) * num_layers
    fields = {
        "model_type": hf["model_type"],
        **{ours: hf[theirs] for ours, theirs in _SIZES.items()},
        "num_kv_heads": hf.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "max_positions": _max_positions(hf, ropes),
        "ropes": ropes,
        "windows": (None,) * num_layers,
        "attention_scale": head_dim**-0.5,
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "activation": activation,
        "tie_embeddings": bool(hf.get("tie_word_embeddings")),
        "num_labels": _num_labels(hf),
    }
    return ModelConfig(**{**fields, **overrides})


def head_dim_of(hf: Mapping[str, Any]) -> int:
    """Returns the number of dims of a head of queries, keys and values."""
    return hf.get("head_dim") or needed(hf, "hidden_size") // needed(hf, "num_attention_heads")


def sliding_layers(hf: Mapping[str, Any], rule: Callable[[int], bool]) -> tuple[bool, ...]:
    """Returns whether each layer has a sliding window, from `layer_types` or else by the family's rule."""
    kinds = hf.get("layer_types")
    if not kinds:
        return tuple(rule(index) for index in range(needed(hf, "num_hidden_layers")))
    unknown = sorted({kind for kind in kinds if kind not in ("full_attention", "sliding_attention")})
    if unknown:
        raise ValueError(f"layer_types has {short_repr(unknown)}; supported are full_attention and sliding_attention")
    return tuple(kind == "sliding_attention" for kind in kinds)


def every_nth_is_full(hf: Mapping[str, Any], period: int) -> Callable[[int], bool]:
    """Returns the rule by which all layers but every n-th slide, with n from `sliding_window_pattern`.

    Args:
        hf: Parsed `config.json`.
        period: The family's default of n.

    Raises:
        ValueError: It is a string and the file has no `layer_types`, which transformers does not support either.
    """
    period = hf.get("sliding_window_pattern") or period
    if isinstance(period, str) and not hf.get("layer_types"):
        raise ValueError(f"config.json has sliding_window_pattern={period!r} and no layer_types; list the layers there")
    return lambda index: (index + 1) % period != 0


def layer_windows(sliding: tuple[bool, ...], window: int | None) -> tuple[int | None, ...]:
    """Returns `ModelConfig.windows`, with a window for the sliding layers."""
    return tuple(window if slides else None for slides in sliding)


def mixer_layers(hf: Mapping[str, Any], kind: str) -> tuple[int, ...]:
    """Returns the layers that `layer_types` says are of a kind without attention.

    Raises:
        ValueError: A layer is of another kind, or their number is not that of `num_hidden_layers`.
    """
    kinds = needed(hf, "layer_types")
    unknown = sorted({each for each in kinds if each not in ("full_attention", kind)})
    if unknown:
        raise ValueError(f"layer_types has {short_repr(unknown)}; supported are full_attention and {kind}")
    if len(kinds) != needed(hf, "num_hidden_layers"):
        raise ValueError(f"layer_types lists {len(kinds)} layers, but num_hidden_layers is {hf['num_hidden_layers']}")
    return tuple(layer for layer, each in enumerate(kinds) if each == kind)


def require(hf: Mapping[str, Any], key: str, supported: Any) -> None:
    """Refuses a config whose `key` is set to anything but `supported`, absent or null."""
    if hf.get(key) not in (None, supported):
        raise ValueError(
            f"config.json has {key}={short_repr(hf[key])}; groupax supports only {supported!r} for {hf['model_type']}"
        )


def needed(hf: Mapping[str, Any], *keys: str) -> Any:
    """Returns the value of the first of these keys that is set.

    Raises:
        ValueError: None of them is set.
    """
    for key in keys:
        if hf.get(key) is not None:
            return hf[key]
    raise ValueError(f"config.json of a {hf['model_type']} model lacks {' or '.join(keys)}")


def _max_positions(hf: Mapping[str, Any], ropes: tuple[Any, ...]) -> int:
    """Returns the file's number, or the original context if longer sequences need other rotary embeddings."""
    limits = [rope.scaling.original_max_positions for rope in ropes if rope and isinstance(rope.scaling, LongRope)]
    return min([hf.get("max_position_embeddings", 2048), *limits])


def _num_labels(hf: Mapping[str, Any]) -> int:
    """Returns the number of labels of a sequence classifier, else 0; transformers' default is two."""
    architectures = hf.get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        return 0
    return len(hf.get("id2label") or ()) or hf.get("num_labels") or 2


def _account_for_all_keys(hf: Mapping[str, Any], read: set[str] | frozenset[str]) -> None:
    if hf.get("quantization_config"):
        raise ValueError("the checkpoint is quantized (quantization_config); load the unquantized weights instead")
    known = read | METADATA | {"layer_types"}
    unknown = sorted(key for key, value in hf.items() if key not in known and value not in (None, False))
    if unknown:
        warnings.warn(
            f"config.json has keys that groupax does not know and ignores: {short_repr(unknown)}", stacklevel=5
        )
