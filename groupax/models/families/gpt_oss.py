"""gpt-oss."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ClampedSwiglu, Experts, ModelConfig
from groupax.models.families.fields import biases, layer_windows, model_config, needed, require, sliding_layers

DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "attention_bias": True,
    "max_position_embeddings": 131072,
}
# The rotary parameters of a file without any.
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads gpt-oss: sinks, windows in every other layer, and experts with biases and a clamped activation."""
    hf = {**DEFAULTS, **without_mxfp4(hf)}
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf["rope_scaling"] = ROPE
    hf.setdefault("rope_theta", 150_000.0)
    require(hf, {"hidden_act": "silu"})
    experts = Experts(
        num=hf.get("num_local_experts") or hf.get("num_experts") or 128,
        per_token=hf["num_experts_per_tok"],
        ffn_size=needed(hf, "intermediate_size"),
        norm_topk_prob=True,  # the same as a softmax over the logits of the chosen ones
        layers=tuple(range(needed(hf, "num_hidden_layers"))),
        # released files have a coefficient of 0.9, which is meant for training from the start, and switch it off
        aux_loss_coef=hf.get("router_aux_loss_coef", 0.9) if hf.get("output_router_logits") else 0.0,
        has_bias=True,
        fused="alternating",
        router_name="mlp.router",
        gate_name="mlp.experts.gate_up_proj",
        up_name="mlp.experts.gate_up_proj",
        down_name="mlp.experts.down_proj",
    )
    return model_config(
        hf,
        windows=layer_windows(sliding_layers(hf, lambda index: index % 2 == 0), hf["sliding_window"]),
        sinks=True,
        activation=ClampedSwiglu(hf.get("swiglu_alpha", 1.702), hf.get("swiglu_limit", 7.0)),
        experts=experts,
        **biases(hf),
    )


def without_mxfp4(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of a `config.json` without a `quantization_config` of mxfp4, which loading dequantizes."""
    quantization = hf.get("quantization_config")
    is_mxfp4 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"
    return {key: value for key, value in hf.items() if key != "quantization_config" or not is_mxfp4}
