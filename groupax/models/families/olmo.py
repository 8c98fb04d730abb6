"""OLMoE, and families with norms after attention and feed-forward: OLMo 2 and 3, and EXAONE 4."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import Experts, ModelConfig
from groupax.models.families.fields import (
    biases,
    every_nth_is_full,
    head_dim_of,
    layer_windows,
    model_config,
    needed,
    read_rope,
    read_ropes_by_kind,
    require,
    sliding_layers,
)


def read_olmoe(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads OLMoE: norms over all query and all key heads of a token, and experts in all layers."""
    hf = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **hf}
    require(hf, {"clip_qkv": None})
    experts = Experts(
        num=needed(hf, "num_experts", "num_local_experts"),
        per_token=needed(hf, "num_experts_per_tok"),
        ffn_size=needed(hf, "intermediate_size"),
        norm_topk_prob=hf.get("norm_topk_prob", False),
        layers=tuple(range(needed(hf, "num_hidden_layers"))),
        aux_loss_coef=hf.get("router_aux_loss_coef", 0.01),
    )
    return model_config(hf, qk_norm="all_heads", experts=experts, **biases(hf))


def read_olmo2(hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    """Reads OLMo 2: norms after attention and feed-forward, and over all query and all key heads of a token.

    Args:
        overrides: What a family that is like it has besides (see `fields.model_config`).
    """
    hf = {"rms_norm_eps": 1e-5, **hf}
    return model_config(hf, block="post_norm", qk_norm="all_heads", **biases(hf), **overrides)


def read_olmo3(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads OLMo 3: OLMo 2 with a sliding window in three of four layers, whose rotary embeddings are not scaled."""
    theta = hf.get("rope_theta") or 500_000.0
    sliding = sliding_layers(hf, every_nth_is_full({}, 4))
    local, full = read_ropes_by_kind(hf, head_dim_of(hf), theta, theta)
    ropes = tuple(local if slides else full for slides in sliding)
    windows = layer_windows(sliding, hf.get("sliding_window", 4096))
    return read_olmo2(hf, ropes=ropes, windows=windows)


def read_exaone4(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads EXAONE 4: norms after attention and feed-forward, and of each head's queries and keys.

    Where some layers have a sliding window, the others have no positions.
    """
    hf = {"rms_norm_eps": 1e-5, **hf}
    window = hf.get("sliding_window", 4096)
    sliding = sliding_layers(hf, (lambda _: False) if window is None else every_nth_is_full(hf, 4))
    rope = read_rope(hf, head_dim_of(hf))
    return model_config(
        hf,
        block="post_norm",
        qk_norm="head",
        ropes=tuple(rope if window is None or slides else None for slides in sliding),
        windows=layer_windows(sliding, window),
    )
