"""Llama, families that differ from it in few fields, and the text of Llama 4.

The former are Phi 3, Granite, Seed-OSS, SmolLM 3, ERNIE 4.5 and Hunyuan.
"""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import Chunks, Experts, ModelConfig, QueryGrowth
from groupax.models.families.fields import (
    biases,
    head_dim_of,
    layer_kinds,
    layer_windows,
    layers_with_rope,
    model_config,
    needed,
    read_rope,
    require,
    rope_table,
    sliding_layers,
)

LLAMA4_DEFAULTS = {
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "intermediate_size_mlp": 16384,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "use_qk_norm": True,
}
CHUNKED = "chunked_attention"
HUNYUAN_NAMES = (("q_norm", "self_attn.query_layernorm"), ("k_norm", "self_attn.key_layernorm"))
LLAMA4_NAMES = tuple((name, f"feed_forward.{name}_proj") for name in ("gate", "up", "down"))


def read_llama(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Llama 2 to 3.2: RMS norms, rotary embeddings and SwiGLU, with biases if the file says so."""
    return model_config(hf, mlp_bias=hf.get("mlp_bias", False), **biases(hf))


def read_phi3(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Phi 3: Llama with fused projections, a sliding window in all layers, and partial rotary embeddings."""
    hf = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **hf}
    # both are older names of longrope
    rope = read_rope(hf, head_dim_of(hf), kinds={"su": "longrope", "yarn": "longrope"}, partial=True)
    fused = {"fused_qkv": True, "fused_gate_up": True}
    return model_config(hf, ropes=rope, windows=hf.get("sliding_window"), **fused)


def read_granite(hf: Mapping[str, Any], experts: Experts | None = None) -> ModelConfig:
    """Reads Granite: Llama with multipliers of embeddings, attention scores, residuals and logits.

    Args:
        experts: Those of a mixture.
    """
    return model_config(
        hf,
        attention_scale=float(hf.get("attention_multiplier", 1.0)),
        embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / hf.get("logits_scaling", 1.0),
        mlp_bias=hf.get("mlp_bias", False),
        experts=experts,
        **biases(hf),
    )


def read_granitemoe(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Granite 3's mixtures: Granite with experts in all layers, in one tensor for their first two matrices."""
    experts = Experts(
        num=needed(hf, "num_local_experts"),
        per_token=needed(hf, "num_experts_per_tok"),
        ffn_size=needed(hf, "intermediate_size"),
        norm_topk_prob=True,  # the same as a softmax over the logits of the chosen ones
        layers=tuple(range(needed(hf, "num_hidden_layers"))),
        aux_loss_coef=hf.get("router_aux_loss_coef", 0.001),
        fused="halves",
        fused_is_transposed=False,
        router_name="block_sparse_moe.router.layer",
        gate_name="block_sparse_moe.input_linear.weight",
        up_name="block_sparse_moe.input_linear.weight",
        down_name="block_sparse_moe.output_linear.weight",
    )
    return read_granite(hf, experts)


def read_seed_oss(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Seed-OSS: Llama with biases of the query, key and value projections by default, and heads of 128 dims."""
    return model_config(
        {"head_dim": 128, **hf},
        qkv_bias=hf.get("attention_bias", True),
        o_bias=hf.get("attention_out_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
    )


def read_smollm3(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads SmolLM 3: Llama in which every fourth layer, or those that the file lists, have no positions."""
    hf = {"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4, **hf}
    rope, has_rope = read_rope(hf, head_dim_of(hf)), layers_with_rope(hf)
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    return model_config(
        hf,
        ropes=tuple(rope if each else None for each in has_rope),
        windows=layer_windows(sliding_layers(hf, lambda index: not has_rope[index]), window),
        mlp_bias=hf.get("mlp_bias", False),
        **biases(hf),
    )


def read_ernie4_5(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads ERNIE 4.5: interleaved rotary embeddings, heads of 128 dims, and biases in all matrices or none."""
    sizes = {"head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072}
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True}
    hf, bias = {**sizes, **defaults, **hf}, hf.get("use_bias", False)
    rope = read_rope(hf, head_dim_of(hf), interleaved=True)
    return model_config(hf, ropes=rope, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def read_hunyuan_v1_dense(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Hunyuan: Llama with norms of each head's queries and keys after rotary embeddings.

    The base of these may be multiplied by alpha^(H / (H - 2)), which files call "dynamic". What else such a table
    has is of other kinds, and not applied by transformers either.
    """
    hf = {"rms_norm_eps": 1e-5, **hf}
    require(hf, {"use_qk_norm": True, "use_cla": False})
    head_dim, table = head_dim_of(hf), dict(rope_table(hf) or {})
    if (alpha := table.get("alpha")) and "dynamic" in (table.get("rope_type"), table.get("type")):
        theta = table.get("rope_theta") or hf.get("rope_theta") or 10_000.0
        table = {"rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}
    rope = read_rope(hf, head_dim, table)
    return model_config(hf, ropes=rope, qk_norm="head_after_rope", module_names=HUNYUAN_NAMES, **biases(hf))


def read_llama4(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Llama 4: attention to chunks in layers with positions, growing queries in those without, and experts.

    The load-balancing loss is left to the setting: transformers has none for this family, whatever its file says.
    """
    hf = {**LLAMA4_DEFAULTS, **hf}
    require(hf, {"router_jitter_noise": 0.0})
    rope, has_rope = read_rope(hf, head_dim_of(hf), interleaved=True), layers_with_rope(hf)
    growth = QueryGrowth(hf["attn_scale"], hf["floor_scale"], offset=1, only_without_rope=True)
    return model_config(
        hf,
        ropes=tuple(rope if each else None for each in has_rope),
        windows=tuple(Chunks(hf["attention_chunk_size"]) if each else None for each in _chunked_layers(hf, has_rope)),
        ffn_size=needed(hf, "intermediate_size_mlp"),
        qk_norm="after_rope" if hf["use_qk_norm"] else "none",
        query_growth=growth if hf["attn_temperature_tuning"] else None,
        experts=_experts(hf),
        module_names=LLAMA4_NAMES,
        **biases(hf),
    )


def _chunked_layers(hf: Mapping[str, Any], has_rope: list[bool]) -> list[bool]:
    has_size, kinds = hf["attention_chunk_size"] is not None, layer_kinds(hf, CHUNKED, "full_attention")
    if not kinds:
        return [each and has_size for each in has_rope]
    if CHUNKED in kinds and not has_size:
        raise ValueError(f"layer_types has {CHUNKED}, but attention_chunk_size is null")
    return [kind == CHUNKED for kind in kinds]


def _experts(hf: Mapping[str, Any]) -> Experts | None:
    num_layers, step = needed(hf, "num_hidden_layers"), hf["interleave_moe_layer_step"]
    listed = hf.get("moe_layers")
    layers = tuple(range(step - 1, num_layers, step) if listed is None else (i for i in listed if i < num_layers))
    if not layers:
        return None
    size = needed(hf, "intermediate_size")
    return Experts(
        num=hf["num_local_experts"],
        per_token=hf["num_experts_per_tok"],
        ffn_size=size,
        norm_topk_prob=False,
        layers=layers,
        scores="sigmoid",
        shared_ffn_size=size,
        weighs_inputs=True,
        fused="halves",
        router_name="feed_forward.router",
        gate_name="feed_forward.experts.gate_up_proj",
        up_name="feed_forward.experts.gate_up_proj",
        down_name="feed_forward.experts.down_proj",
        shared_name="feed_forward.shared_expert",
    )
