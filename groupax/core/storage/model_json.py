"""A schema of a model's JSON files. Imports no jax.

Files are validated before a family reads them, so that readers only compute with numbers of the right kind and size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from groupax.core.terminal.printable import short_repr

# Far beyond any released model. Without these limits a false number would be counted up to before it is noticed.
MAX_LAYERS = MAX_EXPERTS = 4096  # also of the taps of a convolution
MAX_SIZE = 2**31 - 1  # the range of an int32 index


@dataclass(frozen=True)
class Kind:
    """A kind of value that a key of a file may have."""

    description: str  # of the values, in an error message
    accepts: Callable[[Any], bool]  # returns whether a value is of this kind
    is_number: bool = False  # the values are floats, for which files may have integers

    def or_null(self) -> "Kind":
        """Returns the kind that also allows null."""
        text = f"{self.description}, or null"
        return replace(self, description=text, accepts=lambda value: value is None or self.accepts(value))


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number."""
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) < 1e300 and value == value


def integer(low: int = 1, high: int = MAX_SIZE) -> Kind:
    """Returns the kind of integers within bounds."""
    return Kind(
        f"a whole number from {low} to {high}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
    )


def list_of(kind: Kind) -> Kind:
    """Returns the kind of lists whose entries are of one kind."""
    return Kind(
        f"a list, each entry {kind.description}",
        lambda value: isinstance(value, list) and all(map(kind.accepts, value)),
    )


SIZE, TOKEN, COUNT, NUMBERED = integer(), integer(0), integer(1, MAX_LAYERS), integer(0, MAX_LAYERS)
NUMBER = Kind("a finite number", is_number, is_number=True)
POSITIVE = Kind("a finite number above 0", lambda value: is_number(value) and value > 0, is_number=True)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
TABLE = Kind("an object", lambda value: isinstance(value, Mapping)).or_null()
TOKENS = Kind(
    f"{TOKEN.description}, or a list of them",
    lambda value: all(map(TOKEN.accepts, value if isinstance(value, list) else [value])),
)
DTYPE = Kind("float32, bfloat16 or float16", lambda value: value in ("float32", "bfloat16", "float16"))
ANY = Kind("anything", lambda _: True)


def _table(*rows: tuple[Kind, str]) -> Mapping[str, Kind]:
    """Returns the kind of each key; a row has a kind and its keys, with "?" where null is allowed."""
    return {
        key.rstrip("?"): kind.or_null() if key.endswith("?") else kind for kind, keys in rows for key in keys.split()
    }


# `config.json`: all keys that a family reads. A test compares this with the readers.
CONFIG = _table(
    (
        SIZE,
        "attention_chunk_size? block_ff_dim? block_multiple_of decoder_sparse_step floor_scale head_dim? hidden_size "
        "intermediate_size intermediate_size_mlp kv_lora_rank linear_key_head_dim linear_num_key_heads "
        "linear_num_value_heads linear_value_head_dim max_position_embeddings mm_tokens_per_image "
        "moe_intermediate_size n_embd n_head n_inner? n_positions no_rope_layer_interval num_attention_heads "
        "num_key_value_heads? num_labels? original_max_position_embeddings? q_lora_rank? qk_nope_head_dim "
        "qk_rope_head_dim scale_factor shared_expert_intermediate_size v_head_dim vocab_size",
    ),
    (
        FLAG,
        "attention_bias attention_out_bias attn_output_gate block_auto_adjust_ff_dim conv_bias mlp_bias "
        "norm_topk_prob output_router_logits qkv_bias rope_interleave scale_attn_by_inverse_layer_idx "
        "scale_attn_weights tie_embedding tie_word_embeddings use_bias use_expert_bias use_parallel_residual "
        "use_qk_norm use_sliding_window",
    ),
    (
        POSITIVE,
        "attention_multiplier attn_logit_softcapping? block_ffn_dim_multiplier? embedding_multiplier "
        "final_logit_softcapping? layer_norm_eps layer_norm_epsilon logit_scale logits_scaling norm_eps norm_epsilon "
        "partial_rotary_factor? query_pre_attn_scalar rms_norm_eps rope_local_base_freq rope_theta? rotary_emb_base "
        "rotary_pct routed_scaling_factor swiglu_alpha swiglu_limit",
    ),
    (NUMBER, "attn_scale residual_multiplier router_aux_loss_coef"),
    (TABLE, "id2label quantization_config rope_parameters rope_scaling text_config vision_config"),
    (
        COUNT,
        "conv_L_cache full_attention_interval interleave_moe_layer_step linear_conv_kernel_dim n_group n_layer "
        "n_routed_experts num_experts_per_tok num_hidden_layers num_local_experts? topk_group",
    ),
    (NUMBERED, "first_k_dense_replace n_shared_experts num_dense_layers num_experts? num_nextn_predict_layers"),
    (TOKEN, "image_token_id image_token_index max_window_layers sliding_window? video_token_id"),
    (TOKENS, "eos_token_id?"),
    (TEXT, "activation_function? hidden_act? hidden_activation? mlp_type model_type norm_type"),
    (list_of(TEXT), "architectures? layer_types?"),
    (list_of(NUMBERED), "full_attn_idxs? mlp_only_layers? moe_layers? no_rope_layers?"),
    (DTYPE, "dtype? torch_dtype?"),
    (ANY, "attn_temperature_tuning sliding_window_pattern"),
)
# The `vision_config` of models that see images; sizes may not be pairs.
VISION = _table(
    (
        SIZE,
        "embed_dim hidden_size image_size in_channels intermediate_size mlp_ratio num_attention_heads num_channels "
        "num_heads num_position_embeddings out_hidden_size patch_size spatial_merge_size temporal_patch_size "
        "window_size",
    ),
    (COUNT, "depth num_hidden_layers"),
    (list_of(NUMBERED), "deepstack_visual_indexes fullatt_block_indexes"),
    (TEXT, "hidden_act"),
    (POSITIVE, "layer_norm_eps"),
    (TABLE, "rope_parameters"),
    (FLAG, "vision_use_head"),
)
# A table of rotary parameters, in either notation; null is the same as no entry.
ROPE = _table(
    (
        POSITIVE,
        "alpha attention_factor beta_fast beta_slow factor high_freq_factor low_freq_factor partial_rotary_factor "
        "rope_theta",
    ),
    (NUMBER, "llama_4_scaling_beta mscale mscale_all_dim"),
    (TABLE, "full_attention sliding_attention"),
    (list_of(POSITIVE), "long_factor short_factor"),
    (TEXT, "rope_type type"),
    (SIZE, "max_position_embeddings original_max_position_embeddings"),
    (FLAG, "truncate"),
)
# `generation_config.json`: the tokens that end a completion, and the settings that `compat.hf` uses.
GENERATION = _table(
    (SIZE, "max_length? max_new_tokens? num_return_sequences?"),
    (NUMBER, "min_p? temperature? top_p?"),
    (integer(-1), "pad_token_id? top_k?"),
    (FLAG, "do_sample"),
    (TOKENS, "eos_token_id?"),
    (POSITIVE, "repetition_penalty?"),
)


def validate(content: Mapping[str, Any], kinds: Mapping[str, Kind], where: str) -> dict[str, Any]:
    """Returns the content of a file, or of a table in it, after checking its values; numbers become floats.

    Raises a ValueError that names `where` if a value is not of its key's kind; a key without one may have any value.
    """
    for key, kind in kinds.items():
        if key in content and not kind.accepts(content[key]):
            raise ValueError(f"{where} has {key}={short_repr(content[key])}; it must be {kind.description}")
    numbers = {key for key, value in content.items() if value is not None and key in kinds and kinds[key].is_number}
    return {key: float(value) if key in numbers else value for key, value in content.items()}


def validate_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parsed `config.json` after checking its values; flags that are null become false."""
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
