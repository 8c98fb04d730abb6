"""Qwen3-Next."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import Experts, GatedDeltaNet, ModelConfig
from groupax.models.families.fields import head_dim_of, mixer_layers, model_config, needed, require
from groupax.models.families.rope import read_rope

LINEAR_KEYS = (
    "attention_bias",
    "attn_output_gate",
    "full_attention_interval",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_ssm_dtype",
)
SHARED_EXPERT_KEYS = (
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "router_aux_loss_coef",
    "shared_expert_intermediate_size",
)
OWN_KEYS = ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "use_sliding_window")


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts with a gated shared one."""
    require(hf, "use_sliding_window", False)
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    layers = tuple(
        layer
        for layer in range(needed(hf, "num_hidden_layers"))
        if hf.get("num_experts", 512) and (layer + 1) % step == 0 and layer not in dense
    )
    experts = shared_experts(hf, layers, hf.get("norm_topk_prob", True)) if layers else None
    return linear_attention_config(hf, (*OWN_KEYS, *SHARED_EXPERT_KEYS), fused=True, experts=experts)


def linear_attention_config(
    hf: Mapping[str, Any], reads: tuple[str, ...], fused: bool = False, **overrides: Any
) -> ModelConfig:
    """Returns the architecture of a model of Qwen3-Next's kind.

    Args:
        hf: Parsed `config.json`.
        reads: Further keys that the calling family interprets itself.
        fused: Whether the matrices of a gated delta net are fused (see `GatedDeltaNet`).
        overrides: Fields of `ModelConfig` that differ.
    """
    hf = {"head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32_768, **hf}
    require(hf, "attn_output_gate", True)
    require(hf, "mamba_ssm_dtype", "float32")
    layers = range(needed(hf, "num_hidden_layers"))
    if not hf.get("layer_types"):
        interval = hf.get("full_attention_interval", 4)
        hf["layer_types"] = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in layers]
    linear = mixer_layers(hf, "linear_attention")
    net = GatedDeltaNet(
        layers=linear,
        size=hf.get("linear_conv_kernel_dim", 4),
        num_key_heads=hf.get("linear_num_key_heads", 16),
        num_value_heads=hf.get("linear_num_value_heads", 32),
        key_dims=hf.get("linear_key_head_dim", 128),
        value_dims=hf.get("linear_value_head_dim", 128),
        fused=fused,
    )
    rope, bias = read_rope(hf, head_dim_of(hf), partial=True), hf.get("attention_bias", False)
    return model_config(
        hf,
        (*LINEAR_KEYS, *reads),
        ropes=tuple(None if layer in linear else rope for layer in layers),
        norm="zero_centered_rms",
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        attention_gate=True,
        recurrent=net if linear else None,
        **overrides,
    )


def shared_experts(hf: Mapping[str, Any], layers: tuple[int, ...], norm_topk_prob: bool) -> Experts:
    """Returns the experts of these layers, besides which there is one for every token, with a gate."""
    return Experts(
        num=needed(hf, "num_experts", "num_local_experts"),
        per_token=needed(hf, "num_experts_per_tok"),
        ffn_size=needed(hf, "moe_intermediate_size"),
        norm_topk_prob=norm_topk_prob,
        layers=layers,
        aux_loss_coef=hf.get("router_aux_loss_coef", 0.001),
        shared_ffn_size=needed(hf, "shared_expert_intermediate_size"),
        has_shared_gate=True,
        shared_name="mlp.shared_expert",
    )
