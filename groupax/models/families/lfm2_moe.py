"""LFM2 with a mixture of experts."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import Experts, ModelConfig
from groupax.models.families.fields import needed
from groupax.models.families.lfm2 import lfm2_config

EXPERT_KEYS = (
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_dense_layers",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "use_expert_bias",
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads LFM2 MoE: LFM2 with experts chosen by sigmoids in all but the first layers."""
    needed(hf, "layer_types")
    layers = tuple(range(hf.get("num_dense_layers", 2), needed(hf, "num_hidden_layers")))
    return lfm2_config(hf, EXPERT_KEYS, experts=_experts(hf, layers) if layers else None)


def _experts(hf: Mapping[str, Any], layers: tuple[int, ...]) -> Experts:
    return Experts(
        num=needed(hf, "num_experts", "num_local_experts"),
        per_token=needed(hf, "num_experts_per_tok"),
        ffn_size=needed(hf, "moe_intermediate_size"),
        norm_topk_prob=hf.get("norm_topk_prob", True),
        layers=layers,
        aux_loss_coef=hf.get("router_aux_loss_coef", 0.0),
        scores="sigmoid",
        scale=hf.get("routed_scaling_factor", 1.0),
        has_correction=hf.get("use_expert_bias", True),
        sum_eps=1e-6,
        router_name="feed_forward.gate",
        gate_name="feed_forward.experts.{expert}.w1",
        up_name="feed_forward.experts.{expert}.w3",
        down_name="feed_forward.experts.{expert}.w2",
        correction_name="feed_forward.expert_bias",
    )
