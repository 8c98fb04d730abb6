"""DeepSeek V3 and R1."""

import math
from collections.abc import Mapping
from typing import Any

from groupax.models.config import LatentAttention, ModelConfig, YarnRope
from groupax.models.families.fields import model_config, needed, require
from groupax.models.families.glm4_moe import EXPERT_KEYS, sigmoid_experts
from groupax.models.families.rope import read_rope, rope_table

KEYS = (
    "attention_bias",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rope_interleave",
    "v_head_dim",
)
# Keys of released files whose values the architecture fixes.
FIXED = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
UNUSED = ("aux_loss_alpha", "ep_size", "seq_aux")
DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads DeepSeek V3: latent attention, dense layers, then layers with experts chosen by sigmoids within groups."""
    hf = {**DEFAULTS, **hf}
    for key, value in FIXED.items():
        require(hf, key, value)
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
    bias = hf.get("attention_bias", False)
    return model_config(
        hf,
        (*KEYS, *FIXED, *UNUSED, *EXPERT_KEYS),
        ropes=(rope,) * needed(hf, "num_hidden_layers"),
        num_kv_heads=1,
        head_dim=latent.cached_dims,
        attention_scale=scale,
        latent=latent,
        qkv_bias=bias,
        o_bias=bias,
        experts=sigmoid_experts(hf),
    )
