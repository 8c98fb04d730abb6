"""GLM-4 (dense), of April 2025."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import head_dim_of, model_config, needed
from groupax.models.families.rope import read_rope

MODULE_NAMES = (
    ("attention_out_norm", "post_self_attn_layernorm"),
    ("mlp_norm", "post_attention_layernorm"),
    ("mlp_out_norm", "post_mlp_layernorm"),
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads GLM-4: sandwich norms, a fused feed-forward layer, and interleaved rotary embeddings of half a head."""
    hf = {"head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, **hf}
    rope = read_rope(hf, head_dim_of(hf), partial=True, interleaved=True)
    return model_config(
        hf,
        ("attention_bias",),
        ropes=(rope,) * needed(hf, "num_hidden_layers"),
        block="sandwich_norm",
        module_names=MODULE_NAMES,
        qkv_bias=hf.get("attention_bias", True),
        fused_gate_up=True,
    )
