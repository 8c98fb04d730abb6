"""Families: what `transformers` computes, we compute; what we save, it loads."""

import jax.numpy as jnp
import numpy as np
import pytest

from groupax import Engine, SamplingParams, load_model, save_model
from groupax.models.decoder import causal_hidden, head_weights
from groupax.models.families import FAMILIES
from groupax.models.layers import vocabulary_logits

from .conftest import one_device_mesh

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 2.0, 3.0, 5.0]}
MOE = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
SLIDING, FULL = "sliding_attention", "full_attention"

# Settings of each family, at least three, unusual ones among them.
CONFIGS = {
    "llama": [
        {"tie_word_embeddings": True, "rope_parameters": LINEAR},
        {"num_key_value_heads": 4, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 6, "num_key_value_heads": 1, "rope_parameters": DYNAMIC},
        {"rope_parameters": YARN, "head_dim": 16},
        {"rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3}},
    ],
    "mistral": [
        {"sliding_window": 8},
        {"sliding_window": None, "head_dim": 10, "tie_word_embeddings": True},
        {"sliding_window": 17, "num_key_value_heads": 1, "rope_parameters": YARN},
    ],
    "qwen2": [
        {"tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": YARN | {"attention_factor": 1.5}},
    ],
    "qwen3": [
        {"head_dim": 16, "tie_word_embeddings": True},
        {"head_dim": 10, "attention_bias": True, "num_key_value_heads": 4},
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL]},
    ],
    "cohere": [
        {},
        {"use_qk_norm": True, "logit_scale": 0.5, "num_key_value_heads": 1},
        {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 4, "rope_parameters": LINEAR},
    ],
    "cohere2": [
        {"sliding_window": 8, "layer_types": [SLIDING, FULL]},
        {"sliding_window": 5, "num_hidden_layers": 4, "attention_bias": True, "logit_scale": 0.3},
        {"sliding_window": 300, "num_key_value_heads": 1, "tie_word_embeddings": False, "rope_parameters": YARN},
    ],
    "gemma2": [
        {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
        {"sliding_window": 64, "head_dim": 16, "attn_logit_softcapping": 2.0, "num_key_value_heads": 1},
        {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": False, "attn_logit_softcapping": None},
    ],
    "gemma3_text": [
        {"sliding_window": 8, "head_dim": 8, "layer_types": [SLIDING, FULL]},
        {
            "sliding_window": 5,
            "head_dim": 16,
            "num_hidden_layers": 6,
            "rope_parameters": {FULL: LINEAR | {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e3}},
        },
        {"head_dim": 10, "num_key_value_heads": 4, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 20},
    ],
    "phi3": [
        {"sliding_window": 12},
        {"num_key_value_heads": 4, "rope_parameters": LONG, "original_max_position_embeddings": 64},
        {"hidden_size": 64, "partial_rotary_factor": 0.5, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ],
    "olmo2": [
        {},
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        {"attention_bias": True, "num_key_value_heads": 4, "rope_parameters": DYNAMIC},
    ],
    "smollm3": [
        {"no_rope_layers": [1, 0]},
        {"num_hidden_layers": 4, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6, "num_key_value_heads": 1},
    ],
    "granite": [
        {"attention_multiplier": 0.2, "logits_scaling": 4.0},
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "attention_bias": True},
        {"num_key_value_heads": 1, "mlp_bias": True, "tie_word_embeddings": True, "attention_multiplier": 0.35},
    ],
    "mixtral": [
        {"num_local_experts": 4, **MOE},
        {"num_local_experts": 3, **MOE, "sliding_window": 9, "num_key_value_heads": 1, "tie_word_embeddings": True},
        {"num_local_experts": 5, **MOE, "num_experts_per_tok": 1, "head_dim": 10, "rope_parameters": LINEAR},
    ],
    "qwen3_moe": [
        {"num_experts": 4, "moe_intermediate_size": 24, **MOE, "head_dim": 8},
        {"num_experts": 6, "moe_intermediate_size": 16, **MOE, "norm_topk_prob": True, "mlp_only_layers": [0]},
        {
            "num_experts": 3,
            "moe_intermediate_size": 40,
            **MOE,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 10,
            "attention_bias": True,
        },
    ],
}
CASES = [(family, change) for family, changes in CONFIGS.items() for change in changes]
LENGTHS = (50, 37, 3)


def test_every_family_has_cases():
    assert set(CONFIGS) == set(FAMILIES)
    assert min(map(len, CONFIGS.values())) >= 3


# -- against PyTorch


def torch_model(family, change):
    """A random model of `transformers` with weights of a size at which everything matters."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**BASE, **change})
    logit_scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            around = (
                0.0 if (weight.ndim > 1 and "norm" not in name) or name.endswith("bias") or "gemma" in family else 1.0
            )
            size = 0.15 if weight.ndim > 1 else 0.3
            size = size / logit_scale if "embed" in name or "lm_head" in name else size
            weight.copy_(around + size * torch.randn(weight.shape))
    return model.eval()


def torch_logits(model, rows, length):
    """Logits of left-padded rows of this length."""
    import torch

    tokens, mask = np.zeros((2, len(rows), length), np.int64)
    for index, row in enumerate(rows):
        tokens[index, length - len(row) :] = row
        mask[index, length - len(row) :] = 1
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    with torch.no_grad():
        arrays = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        logits = model(**{name: torch.tensor(array) for name, array in arrays.items()}).logits.numpy()
    return [out[length - len(row) :] for out, row in zip(logits, rows, strict=True)]


def our_logits(model, rows, length):
    tokens = np.zeros((len(rows), length), np.int32)
    starts = np.array([length - len(row) for row in rows], np.int32)
    for index, row in enumerate(rows):
        tokens[index, starts[index] :] = row
    hidden = causal_hidden(model.config, model.params, jnp.asarray(tokens), jnp.asarray(starts))
    logits = vocabulary_logits(hidden, head_weights(model.params), model.config.logit_softcap)
    return [out[start:] for out, start in zip(np.asarray(logits), starts, strict=True)]


def check_logits(ours, theirs, atol=1e-4):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=0)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.filterwarnings("error:config.json keys")
@pytest.mark.parametrize(("family", "change"), CASES, ids=str)
def test_logits_are_those_of_transformers(tmp_path, family, change):
    from transformers import AutoModelForCausalLM

    theirs = torch_model(family, change)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs", mesh=one_device_mesh())
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 96, length) for length in LENGTHS]
    expected = torch_logits(theirs, rows, length=56)
    assert 0.5 < np.std(expected[0]) < 50
    check_logits(our_logits(ours, rows, length=56), expected)
    check_logits([our_logits(ours, [row], len(row))[0] for row in rows], expected)

    save_model(ours, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    check_logits(torch_logits(again, rows, length=56), expected, atol=1e-6)

    engine = Engine(ours.config, ours.params, ours.mesh, eos_ids=())
    prompts = [row[:20].astype(np.int32) for row in rows]
    for group in engine.generate(prompts, SamplingParams(n=2, max_tokens=30)):
        for sequence in group:
            whole = np.concatenate([sequence.prompt, sequence.tokens])
            out = torch_logits(theirs, [whole], len(whole))[0][len(sequence.prompt) - 1 : -1]
            logps = out - np.log(np.sum(np.exp(out), axis=-1, keepdims=True))
            np.testing.assert_allclose(
                sequence.policy_logps, logps[np.arange(len(logps)), sequence.tokens], atol=1e-4, rtol=0
            )
