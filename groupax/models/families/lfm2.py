"""LFM2 (dense)."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig, Rope, ShortConvolution
from groupax.models.families.fields import head_dim_of, mixer_layers, model_config, needed, require
from groupax.models.families.rope import read_rope

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
KEYS = ("conv_L_cache", "conv_bias", "full_attn_idxs", "layer_types", "norm_eps", "tie_embedding")
FEED_FORWARD = ("block_auto_adjust_ff_dim", "block_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")
# Keys of released files that repeat others, or say how the model was initialized.
UNUSED = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "theta",
    "use_pos_enc",
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads LFM2: short convolutions in most layers, attention in the others."""
    hf = {"intermediate_size": 12288, **hf}
    layers = range(needed(hf, "num_hidden_layers"))
    if not hf.get("layer_types"):
        given = hf.get("full_attn_idxs")
        attending = set(layers if given is None else given)
        hf["layer_types"] = ["full_attention" if layer in attending else "conv" for layer in layers]
    return lfm2_config(hf, FEED_FORWARD, ffn_size=_ffn_size(hf))


def lfm2_config(hf: Mapping[str, Any], reads: tuple[str, ...], **overrides: Any) -> ModelConfig:
    """Returns the architecture of an LFM2 model of either kind.

    Args:
        hf: Parsed `config.json`, with `layer_types`.
        reads: Further keys that the calling family interprets itself.
        overrides: Fields of `ModelConfig` that differ.
    """
    hf = {"rope_theta": 1_000_000.0, "tie_word_embeddings": True, "max_position_embeddings": 128_000, **hf}
    if hf.get("tie_embedding") is not None:
        hf["tie_word_embeddings"] = hf["tie_embedding"]
    require(hf, "hidden_act", "silu")
    convolving = mixer_layers(hf, "conv")
    rope: Rope = read_rope(hf, head_dim_of(hf))
    return model_config(
        hf,
        (*KEYS, *UNUSED, *reads),
        **{
            "ropes": tuple(None if layer in convolving else rope for layer in range(hf["num_hidden_layers"])),
            "norm_eps": hf.get("norm_eps", 1e-5),
            "qk_norm": "head",
            "module_names": MODULE_NAMES,
            "recurrent": ShortConvolution(
                layers=convolving, size=hf.get("conv_L_cache", 3), has_bias=hf.get("conv_bias", False)
            )
            if convolving
            else None,
            **overrides,
        },
    )


def _ffn_size(hf: Mapping[str, Any]) -> int:
    """Returns the hidden size of feed-forward layers, of which files may state one and a half times as much."""
    size = hf.get("block_ff_dim") or needed(hf, "intermediate_size")
    if not hf.get("block_auto_adjust_ff_dim", True):
        return size
    size, factor, multiple = 2 * size // 3, hf.get("block_ffn_dim_multiplier", 1.0), hf.get("block_multiple_of", 256)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple
