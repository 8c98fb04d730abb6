"""Families: random configurations against `transformers` and PEFT, in all ways in which a model is used."""

import jax
import numpy as np
import pytest

from groupax import Engine, LoRAConfig, SamplingParams, add_adapter, load_model, save_adapter, save_model
from groupax.models.weights.checkpoint import load_adapter
from tests.conftest import one_device_mesh

from .test_families import FULL, LENGTHS, LLAMA3, RANDOM, SLIDING, check_logits, our_logits, torch_logits, torch_model


def pick(rng, *choices):
    return choices[rng.integers(len(choices))]


def kinds(rng, num_layers):
    return [pick(rng, SLIDING, FULL) for _ in range(num_layers)]


def yarn(rng, **more):
    table = {"rope_type": "yarn", "factor": float(pick(rng, 2, 4, 8)), "original_max_position_embeddings": 32}
    return table | {"rope_theta": float(pick(rng, 1e4, 5e5)), "truncate": bool(rng.integers(2))} | more


def plain(rng):
    return {"rope_type": "default", "rope_theta": float(pick(rng, 1e4, 1e6))}


def common(rng):
    kv = int(pick(rng, 1, 2, 4))
    return {
        "hidden_size": int(pick(rng, 24, 32, 48)),
        "num_hidden_layers": int(pick(rng, 2, 3, 5)),
        "num_key_value_heads": kv,
        "num_attention_heads": kv * int(pick(rng, 1, 2, 3)),
        "intermediate_size": int(pick(rng, 40, 64)),
        "tie_word_embeddings": bool(rng.integers(2)),
        "rms_norm_eps": float(pick(rng, 1e-6, 1e-3)),
        "head_dim": int(pick(rng, 8, 12, 16)),
    }


def olmo3(rng):
    hf = common(rng)
    hf["hidden_size"] = 8 * hf["num_attention_heads"]
    del hf["head_dim"]
    tables = {SLIDING: plain(rng), FULL: pick(rng, plain, yarn)(rng)}
    bias = bool(rng.integers(2))
    own = {"layer_types": kinds(rng, hf["num_hidden_layers"]), "sliding_window": int(rng.integers(2, 20))}
    return hf | own | {"rope_parameters": tables, "attention_bias": bias}


def exaone4(rng):
    hf = common(rng)
    window = pick(rng, None, int(rng.integers(2, 20)))
    layer_types = kinds(rng, hf["num_hidden_layers"]) if window else [FULL] * hf["num_hidden_layers"]
    table = pick(rng, plain, yarn)(rng)
    return hf | {"sliding_window": window, "layer_types": layer_types, "rope_parameters": table}


def seed_oss(rng):
    flags = {name: bool(rng.integers(2)) for name in ("attention_bias", "attention_out_bias", "mlp_bias")}
    return common(rng) | flags | {"rope_parameters": pick(rng, plain, yarn)(rng), "residual_dropout": 0.1}


def ministral3(rng):
    table = yarn(
        rng, llama_4_scaling_beta=float(pick(rng, 0.1, 0.7)), mscale=1.0, mscale_all_dim=float(rng.integers(2))
    )
    table["original_max_position_embeddings"] = int(pick(rng, 10, 16, 33))
    return common(rng) | {"rope_parameters": table, "sliding_window": pick(rng, None, int(rng.integers(2, 20)))}


def glm4(rng):
    table = plain(rng) | {"partial_rotary_factor": float(pick(rng, 0.5, 1.0))}
    return common(rng) | {"rope_parameters": table, "attention_bias": bool(rng.integers(2))}


def sigmoid_mixture(rng, num_layers):
    groups = int(pick(rng, 1, 2, 3))
    groups_per_token = int(rng.integers(1, groups + 1))
    return {
        "n_routed_experts": 4 * groups,
        "n_group": groups,
        "topk_group": groups_per_token,
        "num_experts_per_tok": int(rng.integers(1, 4 * groups_per_token)),
        "n_shared_experts": int(pick(rng, 1, 2)),
        "moe_intermediate_size": int(pick(rng, 16, 24)),
        "first_k_dense_replace": int(rng.integers(0, num_layers + 1)),
        "norm_topk_prob": bool(rng.integers(2)),
        "routed_scaling_factor": float(pick(rng, 1.0, 2.5)),
    }


def glm4_moe(rng):
    hf = common(rng)
    flags = {name: bool(rng.integers(2)) for name in ("attention_bias", "use_qk_norm")}
    table = plain(rng) | {"partial_rotary_factor": float(pick(rng, 0.5, 1.0))}
    return hf | sigmoid_mixture(rng, hf["num_hidden_layers"]) | flags | {"rope_parameters": table}


def deepseek_v3(rng):
    hf = common(rng)
    del hf["head_dim"]
    hf["num_key_value_heads"] = hf["num_attention_heads"]
    table = plain(rng) if rng.integers(2) else yarn(rng, mscale=1.0, mscale_all_dim=float(pick(rng, 0.0, 1.0)))
    latent = {
        "kv_lora_rank": int(pick(rng, 8, 16)),
        "q_lora_rank": pick(rng, None, 12),
        "qk_nope_head_dim": int(pick(rng, 4, 8)),
        "qk_rope_head_dim": int(pick(rng, 4, 8)),
        "v_head_dim": int(pick(rng, 6, 20)),
        "attention_bias": bool(rng.integers(2)),
        "rope_interleave": bool(rng.integers(2)),
    }
    return hf | sigmoid_mixture(rng, hf["num_hidden_layers"]) | latent | {"rope_parameters": table}


def gpt_oss(rng):
    hf = common(rng)
    own = {
        "layer_types": pick(rng, None, kinds(rng, hf["num_hidden_layers"])),
        "sliding_window": int(rng.integers(2, 20)),
        "num_local_experts": int(pick(rng, 4, 6)),
        "num_experts_per_tok": int(rng.integers(1, 4)),
        "swiglu_alpha": float(pick(rng, 1.702, 0.7)),
        "swiglu_limit": float(pick(rng, 7.0, 0.3)),
        "attention_bias": bool(rng.integers(2)),
    }
    return hf | own | {"rope_parameters": pick(rng, None, plain(rng), yarn(rng))}


def llama4_text(rng):
    hf = common(rng)
    layers = hf["num_hidden_layers"]
    has_rope = [int(rng.integers(2)) for _ in range(layers)]
    tables = plain(rng), yarn(rng), plain(rng) | LLAMA3 | {"original_max_position_embeddings": 32}
    equal = tables[2] | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    own = {
        "intermediate_size_mlp": int(pick(rng, 40, 56)),
        "num_local_experts": int(rng.integers(2, 6)),
        "num_experts_per_tok": int(pick(rng, 1, 1, 2)),
        "no_rope_layers": pick(rng, None, has_rope),
        "no_rope_layer_interval": int(rng.integers(2, 5)),
        "moe_layers": pick(rng, None, [layers - 1], list(range(0, layers, 2))),
        "interleave_moe_layer_step": int(rng.integers(1, 3)),
        "attention_chunk_size": pick(rng, *rng.integers(3, 24, 4).tolist(), None),
        "attn_temperature_tuning": bool(rng.integers(3)),
        "floor_scale": int(pick(rng, 5, 16)),
        "attn_scale": float(pick(rng, 0.1, 0.5)),
        "use_qk_norm": bool(rng.integers(3)),
        "attention_bias": bool(rng.integers(2)),
        "rope_parameters": pick(rng, *tables, equal),
    }
    return hf | own


def mixers(rng, kind, num_layers):
    """Kinds of layers, at least one with attention and one without."""
    return list(rng.permutation([FULL, kind, *(pick(rng, FULL, kind, kind) for _ in range(num_layers - 2))]).tolist())


def lfm2(rng):
    hf = common(rng)
    own = {
        "layer_types": mixers(rng, "conv", hf["num_hidden_layers"]),
        "conv_L_cache": int(rng.integers(2, 6)),
        "conv_bias": bool(rng.integers(2)),
        "norm_eps": float(pick(rng, 1e-6, 1e-3)),
        "rope_parameters": pick(rng, plain, yarn)(rng),
        "block_auto_adjust_ff_dim": bool(rng.integers(2)),
        "block_ffn_dim_multiplier": float(pick(rng, 1.0, 0.7)),
        "block_multiple_of": int(pick(rng, 8, 16)),
    }
    return hf | own


def lfm2_moe(rng):
    hf = lfm2(rng)
    mixture = {
        "num_dense_layers": int(rng.integers(0, hf["num_hidden_layers"] + 1)),
        "num_experts": int(rng.integers(3, 7)),
        "num_experts_per_tok": int(rng.integers(1, 4)),
        "moe_intermediate_size": int(pick(rng, 16, 24)),
        "norm_topk_prob": bool(rng.integers(2)),
        "use_expert_bias": bool(rng.integers(2)),
        "routed_scaling_factor": float(pick(rng, 1.0, 2.5)),
    }
    return {name: value for name, value in hf.items() if not name.startswith("block_")} | mixture


def qwen3_5_text(rng):
    hf, key_heads = common(rng), int(pick(rng, 1, 2, 3))
    own = {
        "head_dim": int(pick(rng, 8, 16)),
        "layer_types": mixers(rng, "linear_attention", hf["num_hidden_layers"]),
        "linear_conv_kernel_dim": int(rng.integers(2, 6)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * int(pick(rng, 1, 2, 3)),
        "linear_key_head_dim": int(pick(rng, 8, 12, 20)),
        "linear_value_head_dim": int(pick(rng, 8, 12, 20)),
        "attention_bias": bool(rng.integers(2)),
    }
    table = pick(rng, plain, yarn)(rng) | {"partial_rotary_factor": float(pick(rng, 0.25, 0.5, 1.0))}
    return hf | own | {"rope_parameters": table}


def with_shared_expert(rng):
    return {
        "num_experts": int(rng.integers(3, 7)),
        "num_experts_per_tok": int(rng.integers(1, 4)),
        "moe_intermediate_size": int(pick(rng, 16, 24)),
        "shared_expert_intermediate_size": int(pick(rng, 12, 32)),
    }


def qwen3_5_moe_text(rng):
    return qwen3_5_text(rng) | with_shared_expert(rng)


def qwen3_next(rng):
    own = {
        "decoder_sparse_step": int(pick(rng, 1, 1, 2)),
        "mlp_only_layers": pick(rng, [], [0]),
        "norm_topk_prob": bool(rng.integers(2)),
    }
    none = {"num_experts": 0} if rng.integers(5) == 0 else {}
    return qwen3_5_text(rng) | with_shared_expert(rng) | own | none


def qwen2_moe(rng):
    hf, own = common(rng), qwen3_next(rng)
    mixture = ("expert", "moe", "topk", "mlp_only", "sparse")
    own = {key: value for key, value in own.items() if any(word in key for word in mixture)}
    window = {"use_sliding_window": True, "sliding_window": int(rng.integers(2, 20)), "max_window_layers": 3}
    flags = {"qkv_bias": bool(rng.integers(4)), "rope_parameters": pick(rng, plain, yarn)(rng)}
    return hf | own | flags | pick(rng, window, {"use_sliding_window": False})


def olmoe(rng):
    hf = common(rng)
    hf["hidden_size"] = 8 * hf["num_attention_heads"]
    del hf["head_dim"]
    own = {"num_experts": int(rng.integers(3, 7)), "num_experts_per_tok": int(rng.integers(1, 4))}
    flags = {name: bool(rng.integers(2)) for name in ("attention_bias", "norm_topk_prob")}
    return hf | own | flags | {"rope_parameters": plain(rng)}


def granitemoe(rng):
    own = {"num_local_experts": int(rng.integers(3, 7)), "num_experts_per_tok": int(rng.integers(1, 4))}
    scales = {name: float(pick(rng, 0.5, 2)) for name in ("embedding_multiplier", "residual_multiplier")}
    scales |= {"attention_multiplier": 0.3, "logits_scaling": float(pick(rng, 0.5, 4))}
    return common(rng) | own | scales | {"attention_bias": bool(rng.integers(2)), "rope_parameters": plain(rng)}


def gemma(rng):
    act = pick(rng, "gelu", "gelu_pytorch_tanh", "silu")
    return common(rng) | {"hidden_act": act, "attention_bias": bool(rng.integers(2)), "rope_parameters": plain(rng)}


def ernie4_5(rng):
    return common(rng) | {"use_bias": bool(rng.integers(2)), "rope_parameters": pick(rng, plain, yarn)(rng)}


def hunyuan_v1_dense(rng):
    alpha = {"rope_type": "dynamic", "alpha": float(pick(rng, 2, 1000)), "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    table = pick(rng, plain(rng), yarn(rng), plain(rng) | alpha)
    return common(rng) | {"attention_bias": bool(rng.integers(2)), "rope_parameters": table}


def starcoder2(rng):
    own = {
        "use_bias": bool(rng.integers(3)),
        "norm_epsilon": float(pick(rng, 1e-6, 1e-3)),
        "hidden_act": pick(rng, "gelu_pytorch_tanh", "gelu", "gelu_new"),
        "sliding_window": pick(rng, None, int(rng.integers(2, 20))),
    }
    return common(rng) | own | {"rope_parameters": pick(rng, plain, yarn)(rng)}


def gpt2(rng):
    hf = common(rng)
    own = {
        "hidden_size": 8 * hf["num_attention_heads"],
        "n_inner": pick(rng, None, 40),
        "activation_function": pick(rng, "gelu_new", "gelu", "silu"),
        "layer_norm_epsilon": float(pick(rng, 1e-6, 1e-3)),
        "scale_attn_weights": bool(rng.integers(4)),
    }
    del hf["head_dim"]
    return hf | own


def gpt_neox(rng):
    hf = common(rng)
    table = pick(rng, plain, yarn)(rng) | {"partial_rotary_factor": float(pick(rng, 0.25, 0.5, 1.0))}
    own = {
        "hidden_size": 16 * hf["num_attention_heads"],
        "layer_norm_eps": float(pick(rng, 1e-6, 1e-3)),
        "hidden_act": pick(rng, "gelu", "gelu_new"),
        "rope_parameters": table,
    }
    flags = {name: bool(rng.integers(2)) for name in ("attention_bias", "use_parallel_residual")}
    del hf["head_dim"]
    return hf | own | flags


def nemotron(rng):
    table = plain(rng) | {"partial_rotary_factor": float(pick(rng, 0.5, 1.0))}
    flags = {name: bool(rng.integers(2)) for name in ("attention_bias", "mlp_bias")}
    return common(rng) | flags | {"norm_eps": float(pick(rng, 1e-6, 1e-3)), "rope_parameters": table}


FAMILIES = (
    *(deepseek_v3, ernie4_5, exaone4, gemma, glm4, glm4_moe, gpt2, gpt_neox, gpt_oss, granitemoe, hunyuan_v1_dense),
    *(lfm2, lfm2_moe, llama4_text, ministral3, nemotron, olmo3, olmoe, qwen2_moe, qwen3_5_moe_text, qwen3_5_text),
    *(qwen3_next, seed_oss, starcoder2),
)
DRAWS = {each.__name__: each for each in FAMILIES}


def test_the_families_that_promise_random_configurations_have_them():
    assert tuple(DRAWS) == RANDOM


@pytest.mark.parity
@pytest.mark.drawn(1)
@pytest.mark.filterwarnings("default")
@pytest.mark.filterwarnings("error:config.json keys")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", DRAWS)
def test_random_models_are_those_of_transformers(tmp_path, family, seed):
    rng = np.random.default_rng([seed, *family.encode()])
    theirs = torch_model(family, DRAWS[family](rng))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs", mesh=one_device_mesh())
    rows = [rng.integers(3, 96, length) for length in LENGTHS]
    expected = torch_rows(theirs, rows)
    assert 0.1 < np.std(expected[0]) < 50
    check_logits(our_logits(ours, rows, length=56), expected)
    check_saved(tmp_path / "ours", ours, rows, expected)
    check_greedy(theirs, ours, rows)
    check_adapters(tmp_path, theirs, ours, rows)
    check_nf4(tmp_path, rows)


def torch_rows(model, rows):
    """Returns the logits of each row alone: with `conv_bias`, padding of a batch changes them in transformers."""
    return [torch_logits(model, [row], length=len(row))[0] for row in rows]


def check_saved(folder, ours, rows, expected):
    from transformers import AutoModelForCausalLM

    save_model(ours, folder)
    again, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, trust_remote_code=False
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    check_logits(torch_rows(again.eval(), rows), expected, atol=1e-6)


def check_greedy(theirs, ours, rows):
    """Checks the greedy completions of 64 tokens, all prompts together in the engine and one at a time in PyTorch."""
    import torch

    engine = Engine(ours.config, ours.params, ours.mesh, eos_ids=())
    prompts = [row[:40].astype(np.int32) for row in rows]
    groups = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0.0))
    for prompt, [sequence] in zip(prompts, groups, strict=True):
        settings = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        [expected] = theirs.generate(torch.tensor(prompt[None].astype(np.int64)), **settings).numpy()
        np.testing.assert_array_equal(sequence.tokens, expected[len(prompt) :])


def check_adapters(tmp_path, theirs, ours, rows):
    """Checks adapters that either side made on the other one."""
    import peft
    import torch

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if ours.config.latent is not None:
        targets = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    if ours.config.recurrent is not None:
        linear = [name.split(".") for name, each in theirs.named_modules() if isinstance(each, torch.nn.Linear)]
        mixers = ("self_attn", "linear_attn", "conv", "shared_expert_gate")
        targets = sorted({name[-1] for name in linear if name[-2:-1] and {*name[-2:]} & {*mixers}})
    elif not ours.config.gated:
        targets = "all-linear"
    elif "num_experts_per_tok" not in ours.hf_config:  # PEFT takes other names of these families for experts
        targets.append("down_proj")
    made = add_adapter(ours, LoRAConfig(r=3, target_modules=targets), seed=1)
    rng = np.random.default_rng(0)
    trained = jax.tree.map(lambda x: 0.1 * rng.normal(size=x.shape).astype(np.float32), made.adapter.trained)
    adapter = type(made.adapter)(made.adapter.config, made.adapter.frozen, trained, str(tmp_path / "theirs"))
    save_adapter(type(made)(**{**made.__dict__, "adapter": adapter}), tmp_path / "adapter")
    loaded = load_adapter(ours, tmp_path / "adapter")
    on_theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    expected = torch_rows(on_theirs, rows)
    check_logits(our_logits(loaded, rows, length=56), expected)
    assert np.abs(expected[0] - our_logits(ours, rows, length=56)[0]).max() > 1e-3

    base = on_theirs.unload()
    on_theirs = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in on_theirs.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.2)
    on_theirs.save_pretrained(tmp_path / "peft")
    expected = torch_rows(on_theirs.eval(), rows)
    check_logits(our_logits(load_adapter(ours, tmp_path / "peft"), rows, length=56), expected)


def check_nf4(tmp_path, rows):
    """Checks a model in 4 bits against `transformers` with the same weights, dequantized."""
    from transformers import AutoModelForCausalLM

    quantized = load_model(tmp_path / "theirs", mesh=one_device_mesh(), weights="nf4")
    save_model(quantized, tmp_path / "dequantized")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dequantized", attn_implementation="eager", trust_remote_code=False
    )
    check_logits(our_logits(quantized, rows, length=56), torch_rows(theirs.eval(), rows))
