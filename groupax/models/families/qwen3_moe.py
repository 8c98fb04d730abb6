"""Qwen 3 with a mixture of experts."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import Experts, ModelConfig
from groupax.models.families.fields import model_config, needed

KEYS = (
    "attention_bias",
    "decoder_sparse_step",
    "max_window_layers",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "router_aux_loss_coef",
    "sliding_window",
    "use_sliding_window",
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen 3 MoE: experts in every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    layers, step = range(hf.get("num_hidden_layers", 0)), hf.get("decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers") or ()
    experts = Experts(
        num=needed(hf, "num_experts", "num_local_experts"),
        per_token=needed(hf, "num_experts_per_tok"),
        ffn_size=needed(hf, "moe_intermediate_size"),
        norm_topk_prob=hf.get("norm_topk_prob", False),
        layers=tuple(index for index in layers if (index + 1) % step == 0 and index not in dense),
        aux_loss_coef=hf.get("router_aux_loss_coef", 0.001),
    )
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    bias = hf.get("attention_bias", False)
    return model_config(
        hf, KEYS, windows=(window,) * len(layers), qkv_bias=bias, o_bias=bias, qk_norm="head", experts=experts
    )
