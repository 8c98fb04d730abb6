"""Against PEFT and bitsandbytes: adapters and 4-bit weights that either side writes, the other one computes alike."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax import LoRAConfig, add_adapter, init_model, load_model, save_adapter, save_model
from groupax.models.adapted import apply_adapter
from groupax.models.decoder import logits
from groupax.models.lora import adapter_specs, as_lora_config, count_params, residual, trainable_params_line
from groupax.models.weights.nf4 import dequantize_nf4, quantize_nf4, scale_code
from tests.conftest import TINY

from .test_lora import trained_randomly

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

TOKENS = np.random.default_rng(0).integers(0, 96, (3, 40))
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES = [
    ({}, {"r": 4, "lora_alpha": 16}),
    ({"model_type": "qwen2"}, {"r": 3, "target_modules": SEVEN, "bias": "all"}),
    ({"model_type": "qwen2"}, {"r": 3, "target_modules": ("q_proj", "down_proj"), "bias": "lora_only"}),
    ({"model_type": "qwen3", "head_dim": 16}, {"r": 5, "use_rslora": True, "target_modules": ("self_attn.q_proj",)}),
    (
        {"tie_word_embeddings": False},
        {"r": 2, "target_modules": r".*\.1\..*_proj", "modules_to_save": ("lm_head", "embed_tokens", "model.norm")},
    ),
    (
        {"model_type": "qwen2"},
        {"rank_pattern": {"^model.layers.0.self_attn.q_proj": 2, r"mlp\..*": 3, "q_proj": 6}, "use_rslora": True}
        | {"r": 4, "alpha_pattern": {r"1\.mlp.down_proj": 20}, "target_modules": SEVEN},
    ),
    (
        {"tie_word_embeddings": False},
        {"layers_to_transform": (1,), "layers_pattern": "layers", "target_modules": ("q_proj", "gate_proj")}
        | {"r": 4, "modules_to_save": ("layers.0.mlp", "norm", "lm_head")},
    ),
    ({"model_type": "qwen2"}, {"r": 4, "use_dora": True, "bias": "all", "rank_pattern": {"v_proj": 2}}),
    ({}, {"r": 4, "lora_alpha": 6, "init_lora_weights": "pissa", "alpha_pattern": {"q_proj": 3}}),
    ({"model_type": "qwen3"}, {"r": 3, "use_dora": True, "use_rslora": True, "init_lora_weights": "pissa"}),
]


def torch_logits(model):
    import torch

    model.eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def our_logits(model):
    return np.asarray(logits(model.config, model.params, jnp.asarray(TOKENS, jnp.int32)))


def peft_model(base, adapter):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("change", "lora"), CASES, ids=str)
def test_what_we_write_peft_loads(tmp_path, change, lora):
    save_model(init_model({**TINY, **change}, seed=3), tmp_path / "base")
    model = trained_randomly(add_adapter(load_model(tmp_path / "base"), LoRAConfig(**lora)))
    save_adapter(model, tmp_path / "adapter")
    theirs = peft_model(tmp_path / "base", tmp_path / "adapter")
    ours = our_logits(model)
    assert np.abs(ours - our_logits(load_model(tmp_path / "base"))).max() > 0.01
    np.testing.assert_allclose(ours, torch_logits(theirs), atol=1e-4)
    again = our_logits(load_model(tmp_path / "adapter"))  # of twice the rank with PiSSA
    np.testing.assert_allclose(again, ours, rtol=0, atol=2e-5 if "init_lora_weights" in lora else 0)
    merged = load_model(save_model(model, tmp_path / "merged"))
    np.testing.assert_allclose(our_logits(merged), ours, atol=1e-5)
    np.testing.assert_allclose(torch_logits(theirs.merge_and_unload()), ours, atol=1e-4)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("change", "lora"), CASES, ids=str)
def test_what_peft_writes_and_trains_we_load_and_train(tmp_path, change, lora, capsys):
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    save_model(init_model({**TINY, **change}, seed=3), tmp_path / "base")
    torch.manual_seed(0)
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in lora.items()}
    settings.setdefault("target_modules", "all-linear")
    theirs = LoraConfig(task_type="CAUSAL_LM", **settings)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = get_peft_model(base, theirs)
    config = load_model(tmp_path / "base").config
    model.print_trainable_parameters()
    assert capsys.readouterr().out.strip() == trainable_params_line(*count_params(config, LoRAConfig(**lora)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = 0.2 if "lora_" in name else 0.05
            parameter.data += kind * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path / "adapter")
    ours = load_model(tmp_path / "adapter")
    np.testing.assert_allclose(our_logits(ours), torch_logits(model), atol=1e-4)

    def loss(trained):
        policy = logits(ours.config, apply_adapter(residual(ours.adapter), trained), jnp.asarray(TOKENS, jnp.int32))
        return -jnp.mean(jax.nn.log_softmax(policy[:, :-1])[np.arange(3)[:, None], np.arange(39), TOKENS[:, 1:]])

    labels = torch.tensor(TOKENS)
    model.train()(labels, labels=labels).loss.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    theirs = get_peft_model_state_dict(model)
    specs = jax.tree.leaves(adapter_specs(ours.config, ours.adapter.config))
    assert {spec.name for spec in specs} == theirs.keys()
    for spec, gradient in zip(specs, jax.tree.leaves(jax.jit(jax.grad(loss))(ours.adapter.trained)), strict=True):
        np.testing.assert_allclose(gradient, theirs[spec.name].numpy(), rtol=1e-3, atol=2e-5, err_msg=spec.name)


def test_a_new_adapter_begins_as_pefts(tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    save_model(init_model(TINY, seed=3), tmp_path / "base")
    lora = {"r": 4, "use_dora": True, "init_lora_weights": "pissa", "target_modules": ["q_proj", "down_proj"]}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = get_peft_model_state_dict(get_peft_model(base, LoraConfig(**lora)))
    model = load_model(tmp_path / "base")
    for init in ("pissa", "pissa_niter_400"):
        ours = add_adapter(model, LoRAConfig(**{**lora, "init_lora_weights": init})).adapter
        changes, specs = ours.trained["layers"], adapter_specs(model.config, ours.config)["layers"]
        for layer, name in ((0, "q"), (1, "down")):
            change, spec = changes[layer][name], specs[layer][name]
            b, a = (theirs[each.name].numpy() for each in (spec.b, spec.a))
            np.testing.assert_allclose(change.b @ change.a, b @ a, atol=1e-5)  # vectors may have another sign
            np.testing.assert_allclose(change.magnitude, theirs[spec.magnitude.name].numpy(), rtol=1e-5)


def test_a_real_lora_config_is_taken(tmp_path):
    from peft import LoraConfig

    ours = as_lora_config(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    assert ours == LoRAConfig(r=4, lora_alpha=8, target_modules=("q_proj", "v_proj"))
    assert as_lora_config(LoraConfig()).target_modules == ("q_proj", "v_proj")
    given = {"use_dora": True, "rank_pattern": {"q_proj": 4}, "layers_to_transform": [1], "init_lora_weights": "pissa"}
    assert as_lora_config(LoraConfig(**given)) == LoRAConfig(target_modules=("q_proj", "v_proj"), **given)
    given = {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"}
    assert as_lora_config(LoraConfig(**given)).layers_to_transform == (1,)


# -- 4 bits


@pytest.mark.parametrize("shape", [(512, 512), (64, 172), (96, 62), (5, 26)])
def test_nf4_numbers_and_scales_are_those_of_bitsandbytes(shape):
    import torch
    from bitsandbytes.functional import create_dynamic_map, dequantize_4bit, quantize_4bit

    np.testing.assert_array_equal(create_dynamic_map().numpy(), scale_code())
    weight = (0.02 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
    ours = jax.jit(quantize_nf4)(jnp.asarray(weight))
    codes, state = quantize_4bit(torch.tensor(weight), quant_type="nf4", compress_statistics=True)
    np.testing.assert_array_equal(np.asarray(ours.codes).reshape(-1), codes.numpy().reshape(-1))
    np.testing.assert_allclose(ours.scale_scales, state.state2.absmax.numpy(), rtol=1e-5)
    np.testing.assert_allclose(ours.offset, state.offset.item(), rtol=1e-6)
    differ = np.flatnonzero(np.asarray(ours.scales) != state.absmax.numpy())  # theirs are the second nearest then
    assert len(differ) <= max(2, 0.005 * ours.scales.size)
    same = np.ones(-(-weight.size // 64), bool)
    same[differ] = False
    same = np.repeat(same, 64)[: weight.size].reshape(shape)
    numbers = np.asarray(dequantize_nf4(ours, jnp.float32))
    np.testing.assert_allclose(numbers[same], dequantize_4bit(codes, state).numpy()[same], rtol=1e-5, atol=1e-8)


def test_what_we_quantize_transformers_loads_and_the_other_way(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    big = {**TINY, "hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}
    model = init_model(big, seed=3)
    save_model(model, tmp_path / "plain")
    save_model(model, tmp_path / "ours", weights="nf4")
    ours = load_model(tmp_path / "ours")
    np.testing.assert_array_equal(our_logits(load_model(tmp_path / "plain", weights="nf4")), our_logits(ours))

    def loaded():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)

    theirs = loaded()
    assert theirs.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    # bitsandbytes multiplies in bfloat16 on CPU, so its weights are compared as float32 numbers
    np.testing.assert_allclose(our_logits(ours), torch_logits(theirs), atol=1e-2)
    np.testing.assert_allclose(our_logits(ours), torch_logits(loaded().dequantize()), atol=1e-4)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=settings, dtype=torch.float32
    )
    quantized.save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    np.testing.assert_allclose(our_logits(again), torch_logits(theirs.dequantize()), atol=1e-4)
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]
