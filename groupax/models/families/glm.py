"""GLM-4 and its mixtures of experts, and DeepSeek V3, whose experts are chosen alike."""

import math
from collections.abc import Mapping
from typing import Any

from groupax.models.config import Experts, LatentAttention, ModelConfig, YarnRope
from groupax.models.families.fields import biases, head_dim_of, model_config, needed, read_rope, require, rope_table

GLM4_NAMES = (
    ("attention_out_norm", "post_self_attn_layernorm"),
    ("mlp_norm", "post_attention_layernorm"),
    ("mlp_out_norm", "post_mlp_layernorm"),
)
# Keys of DeepSeek's released files whose values the architecture fixes.
DEEPSEEK_FIXED = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
DEEPSEEK_DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}


def read_glm4(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads GLM-4: sandwich norms, a fused feed-forward layer, and interleaved rotary embeddings of half a head."""
    hf = {"head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, **hf}
    return model_config(
        hf,
        ropes=read_rope(hf, head_dim_of(hf), partial=True, interleaved=True),
        block="sandwich_norm",
        module_names=GLM4_NAMES,
        qkv_bias=hf.get("attention_bias", True),
        fused_gate_up=True,
    )


def read_glm4_moe(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads GLM-4.5: dense layers, then layers with experts chosen by sigmoids, and partial rotary embeddings."""
    hf = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, **hf}
    defaults = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
    return model_config(
        hf,
        ropes=read_rope(hf, head_dim_of(hf), partial=True),
        qkv_bias=hf.get("attention_bias", False),
        qk_norm="head" if hf.get("use_qk_norm") else "none",
        experts=_sigmoid_experts({**defaults, **hf}),
    )


def read_deepseek_v3(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads DeepSeek V3: latent attention, dense layers, then layers with experts chosen by sigmoids within groups."""
    hf = {**DEEPSEEK_DEFAULTS, **hf}
    require(hf, DEEPSEEK_FIXED)
    latent = LatentAttention(
        query_rank=hf.get("q_lora_rank", 1536),
        rank=needed(hf, "kv_lora_rank"),
        plain_dims=needed(hf, "qk_nope_head_dim"),
        rope_dims=needed(hf, "qk_rope_head_dim"),
        value_dims=needed(hf, "v_head_dim"),
    )
    rope = read_rope(hf, latent.rope_dims, interleaved=hf.get("rope_interleave", True))
    scale = (latent.plain_dims + latent.rope_dims) ** -0.5
    all_dims = (rope_table(hf) or {}).get("mscale_all_dim")
    if isinstance(rope.scaling, YarnRope) and all_dims and rope.scaling.factor > 1:
        scale *= (0.1 * all_dims * math.log(rope.scaling.factor) + 1.0) ** 2
    return model_config(
        hf,
        ropes=rope,
        num_kv_heads=1,
        head_dim=latent.cached_dims,
        attention_scale=scale,
        latent=latent,
        experts=_sigmoid_experts(hf),
        **biases(hf),
    )


def _sigmoid_experts(hf: Mapping[str, Any]) -> Experts | None:
    """Returns the experts of a family whose router has sigmoids and a correction; None if all layers are dense."""
    layers = tuple(range(needed(hf, "first_k_dense_replace"), needed(hf, "num_hidden_layers")))
    if not layers:
        return None
    ffn_size = needed(hf, "moe_intermediate_size")
    return Experts(
        num=needed(hf, "n_routed_experts", "num_local_experts"),
        per_token=needed(hf, "num_experts_per_tok"),
        ffn_size=ffn_size,
        norm_topk_prob=hf.get("norm_topk_prob", True),
        layers=layers,
        aux_loss_coef=hf.get("router_aux_loss_coef", 0.0),
        scores="sigmoid",
        scale=float(needed(hf, "routed_scaling_factor")),
        has_correction=True,
        num_groups=needed(hf, "n_group"),
        groups_per_token=needed(hf, "topk_group"),
        shared_ffn_size=ffn_size * hf.get("n_shared_experts", 1),
    )
