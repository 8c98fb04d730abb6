"""Mixtral."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import Experts, ModelConfig
from groupax.models.families.fields import model_config, needed, require

KEYS = ("num_experts_per_tok", "num_local_experts", "router_aux_loss_coef", "router_jitter_noise", "sliding_window")


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Mixtral: Mistral with a mixture of experts in every layer."""
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **hf}
    require(hf, "router_jitter_noise", 0.0)
    num_layers = hf.get("num_hidden_layers", 0)
    experts = Experts(
        num=needed(hf, "num_local_experts"),
        per_token=needed(hf, "num_experts_per_tok"),
        ffn_size=needed(hf, "intermediate_size"),
        norm_topk_prob=True,
        layers=tuple(range(num_layers)),
        aux_loss_coef=hf.get("router_aux_loss_coef", 0.001),
        router_name="block_sparse_moe.gate",
        gate_name="block_sparse_moe.experts.{expert}.w1",
        up_name="block_sparse_moe.experts.{expert}.w3",
        down_name="block_sparse_moe.experts.{expert}.w2",
    )
    return model_config(hf, KEYS, windows=(hf.get("sliding_window"),) * num_layers, experts=experts)
