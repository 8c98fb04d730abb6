"""Families: agreement with `transformers`, which loads every model that we save."""

import math
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub.errors import StrictDataclassError

from groupax import Engine, SamplingParams, init_model, load_model, save_model
from groupax.models.attention import attend
from groupax.models.config import LongRope
from groupax.models.decoder import causal_hidden, forward, head_weights
from groupax.models.experts import Routing, load_balancing_loss, route
from groupax.models.families import FAMILIES, TEXT_PARTS, VISION_FAMILIES, read_config, text_config
from groupax.models.layers import vocabulary_logits
from groupax.models.rope import frequencies
from groupax.models.specs import layer_specs
from groupax.models.weights.casts import bfloat16_params
from groupax.models.weights.tensor_files import Tensor, own_tensors
from groupax.parallel.mesh import make_mesh
from groupax.rewards.model import RewardModel
from groupax.training.accumulator import ROUTER_LOSS
from groupax.training.state import cast_params
from tests.conftest import TINY, assert_trees_match, one_device_mesh
from tests.data.test_config_and_data import a_tokenizer
from tests.parallel.test_mesh import after_updates
from tests.rewards.test_rewards import rollouts_of

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

# Settings of families, unusual ones among them; `test_random_families` draws those of the others.
CONFIGS = {
    "llama": [
        {"tie_word_embeddings": True, "rope_parameters": LINEAR},
        {"num_key_value_heads": 4, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 6, "num_key_value_heads": 1, "rope_parameters": DYNAMIC},
        {"rope_parameters": YARN, "head_dim": 16},
        {"rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3}},
    ],
    "mistral": [
        {"sliding_window": None, "head_dim": 10, "tie_word_embeddings": True},
        {"sliding_window": 17, "num_key_value_heads": 1, "rope_parameters": YARN},
    ],
    "qwen2": [
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": YARN | {"attention_factor": 1.5}},
    ],
    "qwen3": [
        {"head_dim": 10, "attention_bias": True, "num_key_value_heads": 4},
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL]},
    ],
    "cohere": [
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
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        {"attention_bias": True, "num_key_value_heads": 4, "rope_parameters": DYNAMIC},
    ],
    "smollm3": [
        {"num_hidden_layers": 4, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6, "num_key_value_heads": 1},
    ],
    "granite": [
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "attention_bias": True},
        {"num_key_value_heads": 1, "mlp_bias": True, "tie_word_embeddings": True, "attention_multiplier": 0.35},
    ],
    "mixtral": [
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
    "glm4_moe": [
        {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "routed_scaling_factor": 2.5,
        }
    ],
    "gpt_oss": [
        {
            "head_dim": 8,
            "sliding_window": 9,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.6,
            "rope_parameters": YARN | {"truncate": False},
        }
    ],
}
RANDOM = (
    *("deepseek_v3", "ernie4_5", "exaone4", "gemma", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "granitemoe"),
    *("hunyuan_v1_dense", "lfm2", "lfm2_moe", "llama4_text", "ministral3", "nemotron", "olmo3", "olmoe", "qwen2_moe"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "seed_oss", "starcoder2"),
)
CASES = [(family, change) for family, changes in CONFIGS.items() for change in changes]
LENGTHS = (50, 37, 3)


def test_every_family_has_cases():
    assert {*CONFIGS, *RANDOM} == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "config", "coef"),
    [
        ("gpt_oss", {"router_aux_loss_coef": 0.9}, 0.0),
        ("gpt_oss", {"router_aux_loss_coef": 0.9, "output_router_logits": True}, 0.9),
        ("mixtral", {"router_aux_loss_coef": 0.02}, 0.02),
    ],
)
def test_the_load_balancing_loss_of_a_file_is_the_default(family, config, coef):
    hf = {**BASE, "model_type": family, **CONFIGS[family][0], **config}
    assert read_config(hf).experts.aux_loss_coef == coef


@pytest.mark.heavy
def test_fused_and_stacked_weights_are_placed_as_the_mesh_says(tmp_path):
    mesh = make_mesh((1, 2, 2, 1, 1))
    for family, change in (("phi3", {}), ("mixtral", {"num_local_experts": 4, **MOE})):
        model = init_model({**BASE, "model_type": family, **change}, seed=1)
        again = load_model(save_model(model, tmp_path / family), mesh=mesh)
        assert_trees_match(model.params, again.params)
    assert again.params["layers"][0]["expert_up"].addressable_shards[0].data.shape == (2, 64, 16)


# -- rotary embeddings


def test_long_factors_are_for_models_of_longer_sequences(tmp_path):
    hf = {**BASE, "model_type": "phi3", "rope_scaling": {**LONG, "type": "su"}, "original_max_position_embeddings": 64}
    hf["rope_scaling"].pop("rope_type")
    config = read_config(hf)
    assert config.max_positions == 64
    assert isinstance(config.ropes[0].scaling, LongRope)
    assert config.ropes[0].scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    short, long = (frequencies(config.ropes[0], positions) for positions in (64, 65))
    np.testing.assert_allclose(short / long, np.divide(LONG["long_factor"], LONG["short_factor"]), rtol=1e-6)
    save_model(init_model(hf), tmp_path / "model")
    assert load_model(tmp_path / "model", max_positions=200).config.max_positions == 200
    with pytest.raises(ValueError, match="exceeds the model's 64 positions"):
        Engine(config, {"embed": jnp.zeros((96, 32))}, make_mesh(), ()).generate([3], SamplingParams(max_tokens=64))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_two_tables_that_differ_are_refused(family):
    hf = {**BASE, "model_type": family, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    with pytest.raises(ValueError, match=r"config.json has rope_scaling=.*, but rope_parameters=.* remove rope_sca"):
        read_config({**hf, "rope_scaling": yarn})


# -- mixtures of experts


def test_the_load_balancing_loss_counts_real_tokens_of_all_layers():
    rng = np.random.default_rng(0)
    probs = jnp.asarray(rng.dirichlet(np.ones(4), (2, 6)), jnp.float32)
    chosen = jnp.argsort(-probs, axis=-1)[..., :2].astype(jnp.int32)
    routings = [Routing(p, c) for p, c in zip(probs, chosen, strict=True)]
    counted = jnp.array([True] * 5 + [False])
    frequency = np.bincount(np.asarray(chosen[:, :5]).reshape(-1), minlength=4) / 10
    expected = 4 * np.sum(frequency * np.asarray(probs[:, :5]).mean(axis=(0, 1)))
    assert float(load_balancing_loss(routings, counted)) == pytest.approx(expected, rel=1e-5)
    even = Routing(jnp.full((4, 4), 0.25), jnp.array([[0, 1], [2, 3], [0, 2], [1, 3]]))
    assert float(load_balancing_loss([even], jnp.ones(4, bool))) == pytest.approx(2.0)


@pytest.mark.heavy
def test_the_router_loss_counts_as_much_as_the_setting_says():
    hf = {**BASE, "model_type": "mixtral", "num_local_experts": 4, **MOE, "num_hidden_layers": 1}
    losses = {}
    for coef in (None, 0.0, 3.0):
        metrics = after_updates(init_model(hf, mesh=one_device_mesh()), router_aux_loss_coef=coef, beta=0.0)[1]
        losses[coef] = metrics["loss"]
    balance = metrics[ROUTER_LOSS]
    assert 2.0 < balance < 2.5
    assert losses[3.0] - losses[0.0] == pytest.approx(3.0 * balance, rel=1e-4)
    assert losses[None] - losses[0.0] == pytest.approx(0.02 * balance, rel=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 4, "topk_group": 1}, "6 experts must be divisible into groups"),
        ({"n_group": 2, "topk_group": 3}, "2 groups, 3 per token"),
        ({"n_group": 3, "topk_group": 1}, "1 of 3 groups have fewer than the 3 experts per token"),
        ({"n_group": 6, "topk_group": 4}, "groups need two experts each"),
    ],
)
def test_groups_of_experts_that_cannot_be_chosen_from_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config({**BASE, "model_type": "glm4_moe", **CONFIGS["glm4_moe"][0], **change})


def test_a_routers_correction_stays_in_float32_and_is_not_trained():
    config = read_config({**BASE, "model_type": "glm4_moe", **CONFIGS["glm4_moe"][0]})
    spec = layer_specs(config, 1)["router_correction"]
    assert spec.is_float32
    assert spec.name == "model.layers.1.mlp.gate.e_score_correction_bias"
    params = {"layers": [{"router": jnp.ones((6, 32)), "router_correction": jnp.ones(6)}]}
    for cast in (cast_params(params, dtype=jnp.bfloat16), bfloat16_params(params)):
        assert [x.dtype for x in jax.tree.leaves(cast)] == [jnp.bfloat16, jnp.float32]
    slope = jax.grad(lambda correction: jnp.sum(route(config.experts, jnp.ones((2, 6)), correction)[0]))
    np.testing.assert_array_equal(slope(jnp.arange(6.0)), 0.0)


@pytest.mark.parametrize("model_type", ["mamba", "", "9b", 3, None])
def test_a_family_without_a_near_one_is_refused_with_all_that_are_supported(model_type):
    with pytest.raises(
        ValueError, match=r"model_type \S+ is not supported; the nearest family is llama; supported are "
    ):
        read_config({**BASE, "model_type": model_type})
    with pytest.raises(ValueError, match=r"model_type \S+ is not supported; supported are cohere, "):
        read_config({"model_type": model_type})


def test_all_other_language_models_of_transformers_are_refused_with_what_is_missing():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS

    refused = {}
    for kind in sorted(MODELS.keys() - FAMILIES.keys() - VISION_FAMILIES.keys() - TEXT_PARTS.keys()):
        with suppress(StrictDataclassError):  # transformers' own defaults are invalid
            config = CONFIG_MAPPING[kind]().to_dict()
            if config["model_type"] in FAMILIES:  # another name of a family
                continue
            with pytest.raises(ValueError, match="is not supported; ") as raised:
                read_config(config)
            refused[kind] = str(raised.value)
    assert len(refused) >= 60
    for kind, expected in {
        "phi": "the nearest family is phi3; supported",
        "gptj": "the nearest family is gpt2, which does not have the keys ['rotary_dim']; supported",
        "gpt_bigcode": "is llama, which does not have the keys ['attention_softmax_in_fp32', 'multi_query'",
        "nemotron_h": "the nearest family is nemotron, which does not have the keys ['chunk_size', 'conv_kernel'",
        "deepseek_v2": "the nearest family is deepseek_v3, whose reader says: config.json has n_group=None",
    }.items():
        assert expected in refused[kind]


# -- text parts of models that see images


def test_tensors_of_a_text_part_have_the_names_of_a_text_model(caplog):
    hf = {"model_type": "mistral3", "text_config": {**BASE, "model_type": "mistral"}, "eos_token_id": [2, 3]}
    own = read_config(hf["text_config"])
    assert read_config(hf) == own
    text = text_config(hf)
    assert (text["architectures"], text["eos_token_id"]) == (["MistralForCausalLM"], 2)
    names = ["language_model.model.norm.weight", "model.language_model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
    images = ["vision_tower.embeddings.weight", "model.multi_modal_projector.weight"]
    tensors = {name: Tensor((), name, lambda _: np.array(0), ()) for name in [*names, *images, "other"]}
    found = own_tensors(hf, own, tensors, Path("folder"))
    assert list(found) == ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight", "other"]
    assert found["model.norm.weight"] is tensors[names[0]]
    assert "2 of its 6 tensors" in caplog.text


def test_layers_that_predict_tokens_ahead_are_left_out():
    names = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(4)]
    tensors = dict.fromkeys(names, Tensor((), "F32", lambda _: np.array(0), ()))
    hf = {**BASE, "model_type": "glm4_moe", **CONFIGS["glm4_moe"][0], "num_nextn_predict_layers": 1}
    config = read_config({**hf, "num_hidden_layers": 2})
    assert list(own_tensors(hf, config, tensors, Path("folder"))) == [names[0], names[1], names[3]]
    assert text_config(hf)["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config of config.json is None"),
        ({"text_config": {"model_type": "llama"}}, "supported in a mistral3 model are ministral3, mistral"),
        ({"architectures": ["Mistral3ForSequenceClassification"]}, "causal language models only"),
    ],
)
def test_models_with_images_whose_text_part_is_not_supported_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config({"model_type": "mistral3", "text_config": {}, **change})


# -- against PyTorch


def torch_model(family, change):
    """Returns a random model of `transformers` with weights large enough that every part matters."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**BASE, **change})
    logit_scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_centered = (
                "gemma" in family
                or family == "nemotron"
                or (family.startswith(("qwen3_n", "qwen3_5")) and "linear_attn" not in name)
            )
            around = 0.0 if (weight.ndim > 1 and "norm" not in name) or name.endswith("bias") or is_centered else 1.0
            around = -2.0 if name.endswith("A_log") else around  # memories of several tokens
            size = 0.15 if weight.ndim > 1 else 0.3
            size = size / logit_scale if "embed" in name or "lm_head" in name else size
            weight.copy_(around + size * torch.randn(weight.shape))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn(buffer.shape))
    return model.eval()


def torch_logits(model, rows, length):
    """Returns the logits of left-padded rows of this length.

    Llama 4's queries grow with their column there, which is their position only in a row without padding.
    """
    import torch

    if getattr(model.config, "attn_temperature_tuning", False) and len(rows) > 1:
        return [torch_logits(model, [row], len(row))[0] for row in rows]
    tokens, mask = np.zeros((2, len(rows), length), np.int64)
    for index, row in enumerate(rows):
        tokens[index, length - len(row) :] = row
        mask[index, length - len(row) :] = 1
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    with torch.no_grad():
        arrays = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        logits = model(**{name: torch.tensor(array) for name, array in arrays.items()}).logits.numpy()
    return [out[length - len(row) :] for out, row in zip(logits, rows, strict=True)]


@partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens, starts):
    hidden = causal_hidden(config, params, tokens, starts)
    return vocabulary_logits(hidden, head_weights(params), config.logit_softcap)


def our_logits(model, rows, length):
    tokens = np.zeros((len(rows), length), np.int32)
    starts = np.array([length - len(row) for row in rows], np.int32)
    for index, row in enumerate(rows):
        tokens[index, starts[index] :] = row
    logits = logits_of(model.config, model.params, jnp.asarray(tokens), jnp.asarray(starts))
    return [out[start:] for out, start in zip(np.asarray(logits), starts, strict=True)]


def check_logits(ours, theirs, atol=1e-4):
    assert_trees_match(ours, theirs, atol=atol, rtol=0)


@pytest.mark.drawn(9)
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


@pytest.mark.drawn(1)
@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 40, "max_position_embeddings": 160}),
        ("llama", {"rope_parameters": {**DYNAMIC}, "max_position_embeddings": 30}),
    ],
)
def test_sequences_beyond_the_original_context(tmp_path, family, change):
    theirs = torch_model(family, change)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs", mesh=one_device_mesh(), max_positions=50)
    row = np.random.default_rng(0).integers(3, 96, 50)
    check_logits(our_logits(ours, [row], 50), torch_logits(theirs, [row], 50))


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_the_router_loss_is_that_of_transformers(tmp_path):
    import torch

    theirs = torch_model("mixtral", {"num_local_experts": 4, **MOE})
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs", mesh=one_device_mesh())
    tokens = np.random.default_rng(0).integers(3, 96, (1, 40))
    expected = theirs(input_ids=torch.tensor(tokens), output_router_logits=True).aux_loss.item()
    _, routings = routed_logits(ours, tokens)
    assert float(load_balancing_loss(routings, jnp.ones(40, bool))) == pytest.approx(expected, rel=1e-5)


def routed_logits(model, tokens):
    def attend_causally(attn, cache, q, k, v):
        return attend(q[None], k[None], v[None], jnp.zeros(1, jnp.int32), attn)[0], cache

    flat = jnp.asarray(tokens[0], jnp.int32)
    hidden, _, routings = forward(model.config, model.params, flat, jnp.arange(len(flat)), attend_causally)
    return hidden, routings


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_the_real_model_survives_load_save_load(stories, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    reference = np.load(stories / "greedy_reference.npz")
    folder = save_model(load_model(stories), tmp_path / "model")
    tokens = torch.tensor(reference["tokens"][None].astype(np.int64))
    with torch.no_grad():
        out, theirs = (AutoModelForCausalLM.from_pretrained(each)(tokens).logits[0] for each in (folder, stories))
    np.testing.assert_allclose(out, reference["logits"], atol=1e-4)
    np.testing.assert_allclose(out, theirs, atol=1e-6)


@pytest.mark.drawn(1)
@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_reward_model_scores_as_in_transformers(tmp_path, model_type):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification

    architecture = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type]
    config = {**TINY, "model_type": model_type, "head_dim": 8, "vocab_size": 13, "pad_token_id": 0}
    config |= {
        "architectures": [f"{architecture}ForSequenceClassification"],
        "num_labels": 1,
        "id2label": {"0": "reward"},
    }
    model = init_model(config, seed=4)
    params = {**model.params, "score": 50.0 * model.params["score"]}
    params["layers"] = [{k: 8.0 * v for k, v in layer.items()} for layer in params["layers"]]
    tokenizer = a_tokenizer(eos_token="<eos>")
    folder = save_model(
        type(model)(model.config, params, model.mesh, model.hf_config, {}), tmp_path / "model", tokenizer
    )
    rows = rollouts_of(["abc", "b", "cab" * 30, "hig" * 7, ""])
    # given, because transformers reads any tokenizer in the folder of a Qwen 2 model as its own kind
    ours = RewardModel(folder, tokenizer).rewards(rows)

    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    ids = [tokenizer(row.prompt + row.text)["input_ids"] for row in rows]
    longest = max(map(len, ids))
    with torch.no_grad():
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
        hidden = theirs.model(input_ids=padded, attention_mask=mask).last_hidden_state
        expected = theirs.score(hidden)[torch.arange(len(ids)), mask.sum(1) - 1, 0].numpy()
        alone = [theirs(input_ids=torch.tensor([row])).logits[0, 0].item() for row in ids]
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    np.testing.assert_allclose(ours, alone, atol=1e-4)
    assert np.ptp(ours) > 0.1
