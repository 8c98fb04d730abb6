"""Strict reading of `config.json`: the keys that all families share, and rotary embeddings."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args

from groupax.core.storage.model_json import CONFIG
from groupax.core.terminal.printable import short_repr
from groupax.models.config import (
    Activation,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    Rope,
    RopeScaling,
    YarnRope,
)

# Keys that no reader interprets: they do not affect the forward pass, repeat others, or may have one value only.
UNREAD = (
    "_name_or_path _sliding_window_pattern attention_dropout attn_pdrop auto_map aux_loss_alpha block_dim "
    "block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init bos_token_id "
    "cache_implementation classifier_dropout compression_ratio conv_dim conv_dim_out conv_use_xavier_init embd_pdrop "
    "embedding_dropout eod_token_id ep_size experts_per_token for_llm_compressor hidden_dropout "
    "initial_context_length initializer_range label2id mamba_ssm_dtype moe_layer_freq mtp_num_hidden_layers "
    "mtp_use_dedicated_embeddings n_ctx num_heads order_of_interleaved_layers pad_token_id position_embedding_type "
    "pretraining_tp problem_type qk_head_dim reorder_and_upcast_attn resid_pdrop residual_dropout return_dict "
    "router_jitter_noise scoring_func seq_aux summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj task_specific_params theta tokenizer_class topk_method transformers_version "
    "use_bidirectional_attention use_cache use_cla use_embedding_sharing use_gated_activation use_parallel_block "
    "use_parallel_embedding use_pos_enc"
)
# Rotary parameters that tell apart the axes of images, which texts do not have.
AXES = ("mrope_interleaved", "mrope_section")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
}


def model_config(hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    """Returns the architecture of a Llama-like model.

    Args:
        overrides: Fields of `ModelConfig` that differ from Llama's; `ropes` and `windows` may be one for all layers. A
            family has interpreted `layer_types` if it gives a window for each layer, or what is `recurrent`.
    """
    missing = [key for key in _SIZES.values() if key not in hf]
    if missing:
        raise ValueError(f"config.json of a {hf['model_type']} model lacks {', '.join(missing)}")
    _account_for_all_keys(hf)
    require(hf, {"pretraining_tp": 1})
    has_kinds = isinstance(overrides.get("windows"), tuple) or "recurrent" in overrides
    if not has_kinds:
        layer_kinds(hf, "full_attention")
    activation = hf.get("hidden_act") or "silu"
    if activation not in get_args(Activation):
        supported = ", ".join(get_args(Activation))
        raise ValueError(f"config.json has hidden_act={short_repr(activation)}; supported are {supported}")

    num_layers, num_heads = hf["num_hidden_layers"], hf["num_attention_heads"]
    head_dim = head_dim_of(hf)
    ropes = overrides.pop("ropes", None) or read_rope(hf, head_dim)
    windows = overrides.pop("windows", None)
    ropes, windows = (x if isinstance(x, tuple) else (x,) * num_layers for x in (ropes, windows))
    fields = {
        "model_type": hf["model_type"],
        **{ours: hf[theirs] for ours, theirs in _SIZES.items()},
        "num_kv_heads": hf.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "max_positions": _max_positions(hf, ropes),
        "ropes": ropes,
        "windows": windows,
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


def layer_kinds(hf: Mapping[str, Any], *supported: str) -> list[str]:
    """Returns `layer_types`, without any if the file does not say.

    Raises:
        ValueError: A layer is of another than the supported kinds.
    """
    kinds = hf.get("layer_types") or []
    if unknown := sorted({kind for kind in kinds if kind not in supported}):
        raise ValueError(
            f"layer_types has {short_repr(unknown)}; supported for {hf['model_type']} are {' and '.join(supported)}"
        )
    return kinds


def sliding_layers(hf: Mapping[str, Any], rule: Callable[[int], bool]) -> tuple[bool, ...]:
    """Returns whether each layer has a sliding window, from `layer_types` or else by the family's rule."""
    kinds = layer_kinds(hf, "full_attention", "sliding_attention")
    if not kinds:
        return tuple(rule(index) for index in range(needed(hf, "num_hidden_layers")))
    return tuple(kind == "sliding_attention" for kind in kinds)


def every_nth_is_full(hf: Mapping[str, Any], period: int) -> Callable[[int], bool]:
    """Returns the rule by which all layers but every n-th slide; n is the file's pattern, or else the family's.

    Raises:
        ValueError: It is no number and the file has no `layer_types`, which transformers does not support either.
    """
    period = hf.get("sliding_window_pattern") or period
    if not isinstance(period, int) and not hf.get("layer_types"):
        raise ValueError(
            f"config.json has sliding_window_pattern={short_repr(period)} and no layer_types; list the layers there"
        )
    return lambda index: (index + 1) % period != 0


def layer_windows(sliding: tuple[bool, ...], window: int | None) -> tuple[int | None, ...]:
    """Returns `ModelConfig.windows`, with a window for the sliding layers."""
    return tuple(window if slides else None for slides in sliding)


def mixer_layers(hf: Mapping[str, Any], kind: str) -> tuple[int, ...]:
    """Returns the layers that `layer_types` says are of a kind without attention.

    Raises:
        ValueError: A layer is of another kind, or their number is not that of `num_hidden_layers`.
    """
    kinds = layer_kinds(hf, "full_attention", kind)
    if len(kinds) != needed(hf, "num_hidden_layers"):
        raise ValueError(f"layer_types lists {len(kinds)} layers, but num_hidden_layers is {hf['num_hidden_layers']}")
    return tuple(layer for layer, each in enumerate(kinds) if each == kind)


def layers_with_rope(hf: Mapping[str, Any]) -> list[bool]:
    """Returns which layers have positions: those with a 1 in `no_rope_layers`, or all but one of each interval."""
    num_layers, interval, listed = (
        needed(hf, "num_hidden_layers"),
        hf["no_rope_layer_interval"],
        hf.get("no_rope_layers"),
    )
    if listed and len(listed) < num_layers:
        raise ValueError(f"config.json lists {len(listed)} no_rope_layers of {num_layers} layers")
    return [bool(listed[index]) if listed else (index + 1) % interval != 0 for index in range(num_layers)]


def biases(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields for `attention_bias`, which is about all four matrices of attention."""
    bias = hf.get("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias}


def require(hf: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Refuses a config in which one of these keys has another value and is not null."""
    for key, value in supported.items():
        if hf.get(key) not in (None, value):
            raise ValueError(
                f"config.json has {key}={short_repr(hf[key])}; groupax supports only {value!r} for {hf['model_type']}"
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


def unknown_keys(hf: Mapping[str, Any]) -> list[str]:
    """Returns the keys with a value that no family has."""
    known = {*CONFIG, *UNREAD.split()}
    return sorted(key for key, value in hf.items() if key not in known and value not in (None, False))


def _account_for_all_keys(hf: Mapping[str, Any]) -> None:
    if hf.get("quantization_config"):
        raise ValueError("the checkpoint is quantized (quantization_config); load the unquantized weights instead")
    if unknown := unknown_keys(hf):
        warnings.warn(
            f"config.json has keys that groupax does not know and ignores: {short_repr(unknown)}", stacklevel=5
        )


# -- rotary embeddings


class _Parameters:
    """A table of rotary parameters, each of which must be consumed.

    Args:
        table: `rope_parameters` (transformers 5), `rope_scaling`, or an entry of it for one kind of layer.
    """

    def __init__(self, table: Mapping[str, Any] | None, hf: Mapping[str, Any]) -> None:
        self.left = {key: value for key, value in (table or {}).items() if value is not None and key not in AXES}
        self.hf = hf
        named = [self.left.pop(key) for key in ("rope_type", "type") if key in self.left]
        self.kind: str = named[0] if named else "default"

    def take(self, name: str, default: Any = None) -> Any:
        """Consumes an entry and returns it, or the default if there is none.

        Raises:
            ValueError: There is neither an entry nor a default.
        """
        value = self.left.pop(name, default)
        if value is None:
            raise ValueError(f"rope type {self.kind!r} of config.json lacks {name}")
        return value

    @property
    def original_max_positions(self) -> int:
        """Context before scaling."""
        own = self.take("original_max_position_embeddings", self.max_positions)
        return self.hf.get("original_max_position_embeddings") or own

    @property
    def max_positions(self) -> int:
        """Context after scaling."""
        return self.hf.get("max_position_embeddings", 2048)


def read_rope(
    hf: Mapping[str, Any],
    head_dim: int,
    table: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
    partial: bool = False,
    interleaved: bool = False,
) -> Rope:
    """Returns the rotary embeddings of `rope_parameters` (transformers 5), or of `rope_theta` and `rope_scaling`.

    Args:
        table: _Parameters to use instead of those of `hf`.
        kinds: The family's own meanings of type names.
        partial: Whether the family may rotate some of a head's dims only.
        interleaved: Whether pairs are adjacent dims.

    Raises:
        ValueError: The type is unknown, an entry is missing or unknown, or the file contradicts itself.
    """
    if table is None:
        table = rope_table(hf)
    parameters = _Parameters(table, hf)
    parameters.kind = (kinds or {}).get(parameters.kind, parameters.kind)
    if parameters.kind not in ROPE_KINDS:
        raise ValueError(
            f"rope type {short_repr(parameters.kind)} is not supported; supported are {', '.join(ROPE_KINDS)}"
        )
    theta = float(parameters.take("rope_theta", hf.get("rope_theta") or 10_000.0))
    fraction = float(parameters.take("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0))
    if fraction != 1.0 and not partial:
        raise ValueError(
            f"config.json has partial_rotary_factor={fraction}; groupax supports only 1 for {hf['model_type']}"
        )
    dims = int(head_dim * fraction)
    if not 2 <= dims <= head_dim:
        raise ValueError(f"rotary embeddings need 2 to {head_dim} dims of a head; config.json says {dims}")
    scaling, scale = _scaling(parameters)
    if parameters.left:
        entries = ", ".join(f"{key}={short_repr(value)}" for key, value in sorted(parameters.left.items()))
        raise ValueError(f"rope type {parameters.kind!r} of config.json has {entries}, which groupax does not apply")
    if isinstance(scaling, LongRope) and {len(scaling.short_factors), len(scaling.long_factors)} != {dims // 2}:
        raise ValueError(
            f"rope type 'longrope' needs {dims // 2} factors, one per pair of dims; config.json has "
            f"{len(scaling.short_factors)} short and {len(scaling.long_factors)} long ones"
        )
    return Rope(theta=theta, dims=dims, scaling=scaling, scale=scale, interleaved=interleaved)


def read_ropes_by_kind(
    hf: Mapping[str, Any], head_dim: int, local_theta: float, full_theta: float
) -> tuple[Rope, Rope]:
    """Returns the rotary embeddings of layers with a sliding window, and of the others, which alone may be scaled.

    Args:
        local_theta, full_theta: Base of either if the file's table does not say.

    Raises:
        ValueError: `rope_parameters` has no entry for either kind of layer, or see `read_rope`.
    """
    table = rope_table(hf) if hf.get("rope_parameters") else None
    if table is None:
        local, full = {"rope_theta": local_theta}, {"rope_theta": full_theta, **(hf.get("rope_scaling") or {})}
        return read_rope(hf, head_dim, local), read_rope(hf, head_dim, full)
    other = sorted(set(table) - {"sliding_attention", "full_attention"})
    if other:
        raise ValueError(
            f"rope_parameters of a {hf['model_type']} model must have the entries sliding_attention and "
            f"full_attention, got {short_repr(other)}"
        )
    local = {"rope_theta": local_theta, **(table.get("sliding_attention") or {})}
    full = {"rope_theta": full_theta, **(table.get("full_attention") or {})}
    return read_rope(hf, head_dim, local), read_rope(hf, head_dim, full)


def rope_table(hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns `rope_parameters` of a file, or `rope_scaling` of an older one; None without either.

    Raises:
        ValueError: Both exist and disagree, in which case transformers silently ignores the former.
    """
    table, scaling = hf.get("rope_parameters"), hf.get("rope_scaling")
    if not table or not scaling:
        return table or scaling
    kind = {"rope_type": scaling.get("rope_type") or scaling.get("type") or "default"}
    others = {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}
    said = {"rope_type": "default", **table}
    if any(said.get(key) != value for key, value in (kind | others).items()):
        raise ValueError(
            f"config.json has rope_scaling={short_repr(scaling)}, but rope_parameters={short_repr(table)}; write the "
            "intended values into rope_parameters, and remove rope_scaling"
        )
    return table


def _scaling(parameters: _Parameters) -> tuple[RopeScaling | None, float]:
    """Returns the scaling of a kind of `ROPE_KINDS`, and the factor of cosines and sines."""
    take = parameters.take
    match parameters.kind:
        case "default":
            return None, 1.0
        case "linear":
            return LinearRope(take("factor")), 1.0
        case "dynamic":
            return DynamicRope(take("factor"), parameters.max_positions), 1.0
        case "llama3":
            factor, low, high = take("factor"), take("low_freq_factor"), take("high_freq_factor")
            return Llama3Rope(factor, low, high, parameters.original_max_positions), 1.0
        case "yarn":
            return _yarn(parameters)
        case _:
            return _long(parameters)


def _yarn(parameters: _Parameters) -> tuple[RopeScaling, float]:
    """Reads YaRN; its temperature, 0.1 ln(factor) + 1, scales cosines and sines (arXiv:2309.00071, equation 22)."""
    original, factor = parameters.original_max_positions, parameters.left.pop("factor", None)
    factor = factor or parameters.max_positions / original

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    own, all_dims = (parameters.left.pop(name, 0.0) for name in ("mscale", "mscale_all_dim"))
    scale = temperature(own) / temperature(all_dims) if own and all_dims else temperature(1.0)
    betas = parameters.take("beta_fast", 32.0), parameters.take("beta_slow", 1.0)
    scaling = YarnRope(factor, original, *betas, parameters.take("truncate", True))
    return scaling, parameters.take("attention_factor", scale)


def _long(parameters: _Parameters) -> tuple[RopeScaling, float]:
    """Reads LongRoPE, which scales by sqrt(1 + ln(factor) / ln(original)) (released code of arXiv:2402.13753)."""
    original = parameters.original_max_positions
    factor = parameters.take("factor", parameters.max_positions / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (tuple(map(float, parameters.take(name))) for name in ("short_factor", "long_factor"))
    return LongRope(short, long, original), parameters.take("attention_factor", scale)
