"""A schema of a model's JSON files. Imports no jax.

Files are validated before a family reads them, so that readers only compute with numbers of the right kind and size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from groupax.terminal.printable import short_repr

# Far beyond any released model. Without these limits a false number would be counted up to before it is noticed.
MAX_LAYERS = 4096
MAX_EXPERTS = 4096
MAX_CONVOLUTION = 256
MAX_SIZE = 2**31 - 1  # the range of an int32 index


@dataclass(frozen=True)
class Kind:
    """A kind of value that a key of a file may have.

    Attributes:
        description: Description of the values in an error message.
        accepts: Returns whether a value is of this kind.
        is_number: Whether the values are floats, for which files may have integers.
    """

    description: str
    accepts: Callable[[Any], bool]
    is_number: bool = False

    def or_null(self) -> "Kind":
        """Returns the kind that also allows null."""
        return replace(
            self,
            description=f"{self.description}, or null",
            accepts=lambda value: value is None or self.accepts(value),
        )


def is_integer(value: Any, low: int, high: int) -> bool:
    """Returns whether a value is an integer (and not a boolean) within bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number."""
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) < 1e300 and value == value


def integer(low: int = 1, high: int = MAX_SIZE) -> Kind:
    """Returns the kind of integers within bounds."""
    return Kind(f"a whole number from {low} to {high}", lambda value: is_integer(value, low, high))


def above(low: int) -> Kind:
    """Returns the kind of finite numbers above a bound."""
    return Kind(f"a finite number above {low}", lambda value: is_number(value) and value > low, is_number=True)


def list_of(kind: Kind) -> Kind:
    """Returns the kind of lists whose entries are of one kind."""
    return Kind(
        f"a list, each entry {kind.description}",
        lambda value: isinstance(value, list) and all(map(kind.accepts, value)),
    )


ANY_NUMBER = Kind("a finite number", is_number, is_number=True)
NOT_NEGATIVE = Kind("a finite number of at least 0", lambda value: is_number(value) and value >= 0, is_number=True)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
TABLE = Kind("an object", lambda value: isinstance(value, Mapping)).or_null()
TEXTS = list_of(TEXT).or_null()
DTYPE = Kind("float32, bfloat16 or float16", lambda value: value in ("float32", "bfloat16", "float16")).or_null()
TOKEN = integer(0)
TOKENS = Kind(
    f"{TOKEN.description}, or a list of them",
    lambda value: all(map(TOKEN.accepts, value if isinstance(value, list) else [value])),
).or_null()

# `config.json`: all keys that a family reads. A test compares this with the readers.
CONFIG: Mapping[str, Kind] = {
    "architectures": TEXTS,
    "attention_bias": FLAG,
    "attention_out_bias": FLAG,
    "attention_chunk_size": integer().or_null(),
    "attention_multiplier": above(0),
    "attn_scale": NOT_NEGATIVE,
    "attn_temperature_tuning": Kind(
        "true, false or a whole number", lambda value: isinstance(value, bool) or is_integer(value, 0, MAX_SIZE)
    ),
    "attn_logit_softcapping": above(0).or_null(),
    "attn_output_gate": FLAG,
    "block_auto_adjust_ff_dim": FLAG,
    "block_ff_dim": integer().or_null(),
    "block_ffn_dim_multiplier": above(0).or_null(),
    "block_multiple_of": integer(),
    "conv_L_cache": integer(1, MAX_CONVOLUTION),
    "conv_bias": FLAG,
    "decoder_sparse_step": integer(),
    "embedding_multiplier": above(0),
    "dtype": DTYPE,
    "eos_token_id": TOKENS,
    "first_k_dense_replace": integer(0, MAX_LAYERS),
    "final_logit_softcapping": above(0).or_null(),
    "full_attention_interval": integer(1, MAX_LAYERS),
    "full_attn_idxs": list_of(integer(0, MAX_LAYERS)).or_null(),
    "floor_scale": integer(),
    "head_dim": integer().or_null(),
    "hidden_act": TEXT.or_null(),
    "hidden_activation": TEXT.or_null(),
    "hidden_size": integer(),
    "id2label": TABLE,
    "image_token_id": TOKEN,
    "image_token_index": TOKEN,
    "interleave_moe_layer_step": integer(1, MAX_LAYERS),
    "intermediate_size": integer(),
    "intermediate_size_mlp": integer(),
    "kv_lora_rank": integer(),
    "layer_norm_eps": above(0),
    "layer_types": TEXTS,
    "linear_conv_kernel_dim": integer(1, MAX_CONVOLUTION),
    "linear_key_head_dim": integer(),
    "linear_num_key_heads": integer(),
    "linear_num_value_heads": integer(),
    "linear_value_head_dim": integer(),
    "logit_scale": above(0),
    "logits_scaling": above(0),
    "max_position_embeddings": integer(),
    "max_window_layers": integer(0),
    "mlp_bias": FLAG,
    "mlp_only_layers": list_of(integer(0)).or_null(),
    "mm_tokens_per_image": integer(),
    "model_type": TEXT,
    "moe_intermediate_size": integer(),
    "moe_layers": list_of(integer(0, MAX_LAYERS)).or_null(),
    "n_group": integer(1, MAX_EXPERTS),
    "n_routed_experts": integer(1, MAX_EXPERTS),
    "n_shared_experts": integer(0, MAX_EXPERTS),
    "no_rope_layer_interval": integer(),
    "no_rope_layers": list_of(integer(0, 1)).or_null(),
    "norm_eps": above(0),
    "norm_topk_prob": FLAG,
    "output_router_logits": FLAG,
    "num_attention_heads": integer(),
    "num_dense_layers": integer(0, MAX_LAYERS),
    "num_experts": integer(0, MAX_EXPERTS).or_null(),
    "num_experts_per_tok": integer(1, MAX_EXPERTS),
    "num_hidden_layers": integer(1, MAX_LAYERS),
    "num_key_value_heads": integer().or_null(),
    "num_labels": integer().or_null(),
    "num_local_experts": integer(1, MAX_EXPERTS).or_null(),
    "num_nextn_predict_layers": integer(0, MAX_LAYERS),
    "original_max_position_embeddings": integer(2).or_null(),
    "partial_rotary_factor": Kind(
        "a number above 0 and at most 1", lambda value: is_number(value) and 0 < value <= 1
    ).or_null(),
    "q_lora_rank": integer().or_null(),
    "qk_nope_head_dim": integer(),
    "qk_rope_head_dim": integer(),
    "quantization_config": TABLE,
    "query_pre_attn_scalar": above(0),
    "residual_multiplier": ANY_NUMBER,
    "rms_norm_eps": above(0),
    "rope_interleave": FLAG,
    "rope_local_base_freq": above(1),
    "rope_parameters": TABLE,
    "rope_scaling": TABLE,
    "rope_theta": above(1).or_null(),
    "routed_scaling_factor": above(0),
    "router_aux_loss_coef": NOT_NEGATIVE,
    "scale_factor": integer(),
    "shared_expert_intermediate_size": integer(),
    "sliding_window": integer().or_null(),
    "sliding_window_pattern": Kind(
        "a whole number, or a string of L and G",
        lambda value: is_integer(value, 0, MAX_LAYERS) or (isinstance(value, str) and set(value) <= set("LG")),
    ).or_null(),
    "text_config": TABLE,
    "swiglu_alpha": above(0),
    "swiglu_limit": above(0),
    "tie_embedding": FLAG,
    "tie_word_embeddings": FLAG,
    "topk_group": integer(1, MAX_EXPERTS),
    "torch_dtype": DTYPE,
    "use_expert_bias": FLAG,
    "use_qk_norm": FLAG,
    "use_sliding_window": FLAG,
    "v_head_dim": integer(),
    "video_token_id": TOKEN,
    "vision_config": TABLE,
    "vocab_size": integer(),
}
# The `vision_config` of models that see images; sizes may not be pairs.
VISION: Mapping[str, Kind] = {
    "deepstack_visual_indexes": list_of(integer(0, MAX_LAYERS)),
    "depth": integer(1, MAX_LAYERS),
    "hidden_act": TEXT,
    "hidden_size": integer(),
    "image_size": integer(),
    "in_channels": integer(),
    "intermediate_size": integer(),
    "layer_norm_eps": above(0),
    "num_attention_heads": integer(),
    "num_channels": integer(),
    "num_heads": integer(),
    "num_hidden_layers": integer(1, MAX_LAYERS),
    "num_position_embeddings": integer(),
    "out_hidden_size": integer(),
    "patch_size": integer(),
    "rope_parameters": TABLE,
    "spatial_merge_size": integer(),
    "temporal_patch_size": integer(),
    "vision_use_head": FLAG,
}
# A table of rotary parameters, in either notation; null is the same as no entry.
ROPE: Mapping[str, Kind] = {
    "attention_factor": above(0),
    "beta_fast": above(0),
    "beta_slow": above(0),
    "factor": above(0),
    "full_attention": TABLE,
    "high_freq_factor": above(0),
    "llama_4_scaling_beta": NOT_NEGATIVE,
    "long_factor": list_of(above(0)),
    "low_freq_factor": above(0),
    "max_position_embeddings": integer(),
    "mscale": NOT_NEGATIVE,
    "mscale_all_dim": NOT_NEGATIVE,
    "original_max_position_embeddings": integer(2),
    "partial_rotary_factor": CONFIG["partial_rotary_factor"],
    "rope_theta": above(1),
    "rope_type": TEXT,
    "short_factor": list_of(above(0)),
    "sliding_attention": TABLE,
    "truncate": FLAG,
    "type": TEXT,
}
# `generation_config.json`: the tokens that end a completion, and the settings that `compat.hf` uses.
GENERATION: Mapping[str, Kind] = {
    "do_sample": FLAG,
    "eos_token_id": TOKENS,
    "max_length": integer().or_null(),
    "max_new_tokens": integer().or_null(),
    "min_p": ANY_NUMBER.or_null(),
    "num_return_sequences": integer().or_null(),
    "pad_token_id": integer(-1).or_null(),
    "repetition_penalty": above(0).or_null(),
    "temperature": NOT_NEGATIVE.or_null(),
    "top_k": integer(-1).or_null(),
    "top_p": ANY_NUMBER.or_null(),
}


def validate(content: Mapping[str, Any], kinds: Mapping[str, Kind], where: str) -> dict[str, Any]:
    """Returns the content of a file after checking its values; numbers become floats.

    Args:
        content: Content of the file, or of a table in it.
        kinds: Kinds of some keys; the others may have any value.
        where: Name of the file or the table in an error.

    Raises:
        ValueError: A value is not of its key's kind.
    """
    for key, kind in kinds.items():
        if key in content and not kind.accepts(content[key]):
            raise ValueError(f"{where} has {key}={short_repr(content[key])}; it must be {kind.description}")
    numbers = {key for key, value in content.items() if value is not None and key in kinds and kinds[key].is_number}
    return {key: float(value) if key in numbers else value for key, value in content.items()}


def validate_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parsed `config.json` after checking its values; flags that are null become false.

    Raises:
        ValueError: A value, possibly one of the rotary parameters, is not of its key's kind.
    """
    flags = {key: False for key, value in hf.items() if value is None and CONFIG.get(key) is FLAG}
    tables = {
        name: _validate_rope(hf[name], f"{name} of config.json")
        for name in ("rope_parameters", "rope_scaling")
        if hf.get(name)
    }
    return validate({**hf, **flags}, CONFIG, "config.json") | tables


def _validate_rope(table: Any, where: str) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} is {short_repr(table)}; it must be {TABLE.description}")
    table = validate({key: value for key, value in table.items() if value is not None}, ROPE, where)
    kinds = [kind for kind in ("full_attention", "sliding_attention") if table.get(kind)]
    return table | {kind: _validate_rope(table[kind], f"{kind} of {where}") for kind in kinds}


def out_of_vocabulary(content: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Returns the end-of-sequence tokens of a file that are outside of a model's vocabulary."""
    tokens = content.get("eos_token_id")
    tokens = tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]
    return [token for token in tokens if token >= vocab_size]
