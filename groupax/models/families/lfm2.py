"""LFM2, dense and with a mixture of experts."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import Experts, ModelConfig, ShortConvolution
from groupax.models.families.fields import head_dim_of, mixer_layers, model_config, needed, read_rope, require

MODULE_NAMES = (
    ("attention_norm", "operator_norm"),
    ("mlp_norm", "ffn_norm"),
    ("final_norm", "embedding_norm"),
    ("o", "self_attn.out_proj"),
    ("q_norm", "self_attn.q_layernorm"),
    ("k_norm", "self_attn.k_layernorm"),
    ("gate", "feed_forward.w1"),
    ("up", "feed_forward.w3"),
    ("down", "feed_forward.w2"),
)


def read_lfm2(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads LFM2: short convolutions in most layers, attention in the others."""
    hf = {"intermediate_size": 12288, **hf}
    layers = range(needed(hf, "num_hidden_layers"))
    if not hf.get("layer_types"):
        given = hf.get("full_attn_idxs")
        attending = set(layers if given is None else given)
        hf["layer_types"] = ["full_attention" if layer in attending else "conv" for layer in layers]
    return _lfm2(hf, ffn_size=_ffn_size(hf))


def read_lfm2_moe(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads LFM2 MoE: LFM2 with experts chosen by sigmoids in all but the first layers."""
    needed(hf, "layer_types")
    layers = tuple(range(hf.get("num_dense_layers", 2), needed(hf, "num_hidden_layers")))
    if not layers:
        return _lfm2(hf)
    experts = Experts(
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
    return _lfm2(hf, experts=experts)


def _lfm2(hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    hf = {"rope_theta": 1_000_000.0, "tie_word_embeddings": True, "max_position_embeddings": 128_000, **hf}
    if hf.get("tie_embedding") is not None:
        hf["tie_word_embeddings"] = hf["tie_embedding"]
    require(hf, {"hidden_act": "silu"})
    layers, rope = mixer_layers(hf, "conv"), read_rope(hf, head_dim_of(hf))
    size, has_bias = hf.get("conv_L_cache", 3), hf.get("conv_bias", False)
    return model_config(
        hf,
        ropes=tuple(None if layer in layers else rope for layer in range(hf["num_hidden_layers"])),
        norm_eps=hf.get("norm_eps", 1e-5),
        qk_norm="head",
        module_names=MODULE_NAMES,
        recurrent=ShortConvolution(layers=layers, size=size, has_bias=has_bias) if layers else None,
        **overrides,
    )


def _ffn_size(hf: Mapping[str, Any]) -> int:
    """Returns the hidden size of feed-forward layers, which files may state one and a half times as large."""
    size = hf.get("block_ff_dim") or needed(hf, "intermediate_size")
    if not hf.get("block_auto_adjust_ff_dim", True):
        return size
    size, factor, multiple = 2 * size // 3, hf.get("block_ffn_dim_multiplier", 1.0), hf.get("block_multiple_of", 256)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple
