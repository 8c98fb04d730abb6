"""Mistral, Mixtral and Ministral 3."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import Experts, ModelConfig, QueryGrowth
from groupax.models.families.fields import head_dim_of, model_config, needed, read_rope, require, rope_table

# The rotary parameters of a file of Ministral 3 without any.
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_mistral(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Mistral: Llama with a sliding window in all layers, of 4,096 positions by default."""
    return model_config(hf, windows=hf.get("sliding_window", 4096))


def read_mixtral(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Mixtral: Mistral with a mixture of experts in every layer."""
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **hf}
    require(hf, {"router_jitter_noise": 0.0})
    experts = Experts(
        num=needed(hf, "num_local_experts"),
        per_token=needed(hf, "num_experts_per_tok"),
        ffn_size=needed(hf, "intermediate_size"),
        norm_topk_prob=True,
        layers=tuple(range(needed(hf, "num_hidden_layers"))),
        aux_loss_coef=hf.get("router_aux_loss_coef", 0.001),
        router_name="block_sparse_moe.gate",
        gate_name="block_sparse_moe.experts.{expert}.w1",
        up_name="block_sparse_moe.experts.{expert}.w3",
        down_name="block_sparse_moe.experts.{expert}.w2",
    )
    return model_config(hf, windows=hf.get("sliding_window"), experts=experts)


def read_ministral3(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Ministral 3: Mistral, without a window by default, whose queries grow with their position."""
    hf = {"head_dim": 128, "rms_norm_eps": 1e-5, **hf}
    table = dict(rope_table(hf) or MINISTRAL3_ROPE)
    slope, period = table.pop("llama_4_scaling_beta", None), table.get("original_max_position_embeddings")
    if slope is None or period is None:
        raise ValueError(
            "rope_parameters of a ministral3 model lacks llama_4_scaling_beta or original_max_position_embeddings"
        )
    table.pop("max_position_embeddings", None)  # a copy of that of the file
    return model_config(
        hf,
        ropes=read_rope(hf, head_dim_of(hf), table),
        windows=hf.get("sliding_window"),
        query_growth=QueryGrowth(slope, period),
    )
