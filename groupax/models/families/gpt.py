"""Families with biases of norms and without a gate in feed-forward layers: GPT-2, GPT-NeoX, StarCoder 2, Nemotron."""

from collections.abc import Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families.fields import biases, head_dim_of, model_config, needed, read_rope, require

GPT2_NAMES = (
    ("decoder", "transformer"),
    ("embed", "wte"),
    ("positions", "wpe"),
    ("layers", "h"),
    ("final_norm", "ln_f"),
    ("attention_norm", "ln_1"),
    ("mlp_norm", "ln_2"),
    ("qkv", "attn.c_attn"),
    ("o", "attn.c_proj"),
    ("up", "mlp.c_fc"),
    ("down", "mlp.c_proj"),
)
GPT_NEOX_NAMES = (
    ("decoder", "gpt_neox"),
    ("embed", "embed_in"),
    ("head", "embed_out"),
    ("final_norm", "final_layer_norm"),
    ("qkv", "attention.query_key_value"),
    ("o", "attention.dense"),
    ("up", "mlp.dense_h_to_4h"),
    ("down", "mlp.dense_4h_to_h"),
)
# What all of them have.
_PLAIN: dict[str, Any] = {"norm": "layer", "norm_bias": True, "gated": False}


def read_gpt2(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads GPT-2: learned positions, one matrix for queries, keys and values, and matrices that files transpose."""
    require(hf, {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False})
    size, num_heads = needed(hf, "n_embd", "hidden_size"), needed(hf, "n_head", "num_attention_heads")
    num_layers, num_positions = needed(hf, "n_layer", "num_hidden_layers"), hf.get("n_positions", 1024)
    sizes = {
        "hidden_size": size,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "intermediate_size": hf.get("n_inner") or 4 * size,
        "max_position_embeddings": num_positions,
        "hidden_act": hf.get("activation_function") or "gelu_new",
    }
    scales = {} if hf.get("scale_attn_weights", True) else {"attention_scale": 1.0}
    return model_config(
        {"tie_word_embeddings": True, **hf, **sizes, **_NO_GROUPS},
        ropes=(None,) * num_layers,
        num_learned_positions=num_positions,
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        joint_qkv="by_kind",
        transposed=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        module_names=GPT2_NAMES,
        **scales,
        **_PLAIN,
    )


def read_gpt_neox(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads GPT-NeoX and Pythia: attention and feed-forward in parallel, after a norm each, unless the file denies it.

    One matrix has each head's queries, keys and values. Rotary embeddings are of a quarter of each head by default.
    """
    rope = {"rope_theta": hf.get("rotary_emb_base", 10_000.0), "partial_rotary_factor": hf.get("rotary_pct", 0.25)}
    hf = {"hidden_act": "gelu", **hf, **rope, **_NO_GROUPS}
    bias = hf.get("attention_bias", True)
    return model_config(
        hf,
        ropes=read_rope(hf, head_dim_of(hf), partial=True),
        norm_eps=hf.get("layer_norm_eps", 1e-5),
        block="parallel_norms" if hf.get("use_parallel_residual", True) else "pre_norm",
        joint_qkv="by_head",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        module_names=GPT_NEOX_NAMES,
        **_PLAIN,
    )


# Keys of other families, which these do not read.
_NO_GROUPS = {"head_dim": None, "num_key_value_heads": None}


def read_starcoder2(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads StarCoder 2: grouped queries with rotary embeddings, perhaps a sliding window, and biases everywhere."""
    require(hf, {"mlp_type": "default", "norm_type": "layer_norm"})
    sizes = {"max_position_embeddings": 4096, "num_key_value_heads": 2}
    hf = {**sizes, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, **hf}
    bias = hf.get("use_bias", True)
    return model_config(
        hf,
        windows=hf.get("sliding_window"),
        norm_eps=hf.get("norm_epsilon", 1e-5),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        module_names=(("up", "mlp.c_fc"), ("down", "mlp.c_proj")),
        **_PLAIN,
    )


def read_nemotron(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads Nemotron: centered layer norms, squared ReLUs, and rotary embeddings of half of each head by default."""
    hf = {"hidden_act": "relu2", "partial_rotary_factor": 0.5, "max_position_embeddings": 4096, **hf}
    return model_config(
        hf,
        ropes=read_rope(hf, head_dim_of(hf), partial=True),
        norm_eps=hf.get("norm_eps", 1e-5),
        mlp_bias=hf.get("mlp_bias", False),
        **{**_PLAIN, "norm": "zero_centered_layer"},
        **biases(hf),
    )
