"""GLM-4.5, 4.6 and 4.7 (mixtures of experts)."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import Experts, ModelConfig
from groupax.models.families.fields import head_dim_of, model_config, needed
from groupax.models.families.rope import read_rope

EXPERT_KEYS = (
    "first_k_dense_replace",
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_local_experts",
    "num_nextn_predict_layers",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "topk_group",
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads GLM-4.5: dense layers, then layers with experts chosen by sigmoids, and partial rotary embeddings."""
    hf = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, **hf}
    defaults = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
    return model_config(
        hf,
        ("attention_bias", "use_qk_norm", *EXPERT_KEYS),
        ropes=(read_rope(hf, head_dim_of(hf), partial=True),) * needed(hf, "num_hidden_layers"),
        qkv_bias=hf.get("attention_bias", False),
        qk_norm="head" if hf.get("use_qk_norm") else "none",
        experts=sigmoid_experts({**defaults, **hf}),
    )


def sigmoid_experts(hf: Mapping[str, Any]) -> Experts | None:
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
