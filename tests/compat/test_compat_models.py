"""The model that a script gives to a trainer is the one that is trained."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from groupax.compat import hf, trl
from groupax.compat.fields import CompatWarning
from groupax.compat.hf.loading import read_torch_model
from groupax.compat.trl.policy import policy_of
from tests.training.test_trainer import PROMPTS, count_a

from .conftest import a_config

# PEFT asks transformers in a way of before
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
DENSE = {
    "vocab_size": 13, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {
    **DENSE, "model_type": "qwen3_moe", "moe_intermediate_size": 16, "head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


def changed(model):
    """Returns the model with other trained weights."""
    if model.adapter is None:
        return replace(model, params=jax.tree.map(lambda x: x + 1.0, model.params))
    trained = jax.tree.map(lambda x: x + 1.0, model.adapter.trained)
    return replace(model, adapter=replace(model.adapter, trained=trained))


def trained_leaves(model):
    return jax.tree.leaves(model.adapter.trained if model.adapter is not None else model.params)


def assert_written_back(torch_model):
    """Checks that trained weights reach a PyTorch model, from which they are read again, and no others change."""
    model = read_torch_model(torch_model)
    before = {name: tensor.clone() for name, tensor in torch_model.state_dict().items()}
    after = changed(model)
    hf.TorchWeights(torch_model, model).write(after)
    again = read_torch_model(torch_model)
    for expected, got in zip(trained_leaves(after), trained_leaves(again), strict=True):
        np.testing.assert_array_equal(expected, got)
    if model.adapter is not None:
        assert again.adapter is not None
        base, own = jax.tree.leaves(again.adapter.frozen), jax.tree.leaves(model.adapter.frozen)
        assert sum(not np.array_equal(*pair) for pair in zip(base, own, strict=True)) <= model.config.num_layers * 8
    return {name for name, tensor in torch_model.state_dict().items() if not tensor.equal(before[name])}


@pytest.mark.parity
def test_weights_are_written_back_into_models_of_transformers_and_peft(folder):
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    names = set(model.state_dict())
    assert assert_written_back(model) == names
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.o_proj.weight").fill_(0.5)  # what files do not have
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="mine")
    found = read_torch_model(adapted)
    assert np.all(np.asarray(found.params["layers"][0]["o"]) == 0.5)
    assert {name.split(".")[-2] for name in assert_written_back(adapted)} == {"mine"}
    moe = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MOE))
    with pytest.raises(ValueError, match="stores weights otherwise than their files do"):
        hf.TorchWeights(moe, read_torch_model(moe))


@pytest.mark.parity
def test_biases_and_modules_saved_by_an_adapter_are_written_back():
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**DENSE, "model_type": "qwen2", "tie_word_embeddings": False}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], bias="all", modules_to_save=["lm_head"])
    adapted = peft.get_peft_model(model, lora)
    names = assert_written_back(adapted)
    assert {name for name in names if "lm_head" in name} == {"base_model.model.lm_head.modules_to_save.default.weight"}
    assert sum(name.endswith("bias") for name in names) == 6
    hf_names = {name: (value.shape, value.requires_grad) for name, value in adapted.named_parameters()}
    own = hf.CausalLM(read_torch_model(adapted))
    assert {name: (value.shape, value.requires_grad) for name, value in own.named_parameters()} == hf_names
    assert own.num_parameters(only_trainable=True) == sum(
        value.numel() for value in own.parameters() if value.requires_grad
    )


@pytest.mark.parity
def test_frozen_weights_of_a_pytorch_model_are_refused(folder, tmp_path, monkeypatch):
    import peft
    from transformers import AutoModelForCausalLM

    def refused(model, message):
        with pytest.raises(ValueError, match=message):
            trl.GRPOTrainer(model, count_a, a_config(tmp_path), PROMPTS)

    model, modules = AutoModelForCausalLM.from_pretrained(folder), ["q_proj"]
    model.get_input_embeddings().requires_grad_(False)
    refused(model, r"1 of the 20 weights that groupax would train have requires_grad=False .model.embed_tokens")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, inference_mode=True, target_modules=modules))
    refused(adapted, "is_trainable=True")
    adapted = peft.get_peft_model(adapted.unload(), peft.LoraConfig(r=2, target_modules=modules))
    adapted.get_output_embeddings().requires_grad_(True)
    refused(adapted, "weights outside of the adapter require gradients")
    model = AutoModelForCausalLM.from_pretrained(folder)
    # transformers 5.24 asks for PEFT 0.22, when 0.21 is the newest release
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=modules))
    refused(model, r"wrap the model with peft.get_peft_model")


@pytest.mark.parity
def test_peft_adds_an_adapter_to_a_pytorch_model(folder):
    import peft
    from transformers import AutoModelForCausalLM

    config = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
    weights = []
    for made in (peft.LoraConfig(**config), hf.LoraConfig(**config)):
        model = hf.wrap_with_peft(AutoModelForCausalLM.from_pretrained(folder), made, seed=3)
        weights.append(jax.tree.leaves(read_torch_model(model).adapter.trained))
    assert all(np.array_equal(*pair) for pair in zip(*weights, strict=True))
    with pytest.raises(ValueError, match="a PyTorch model takes a LoraConfig as peft_config"):
        hf.wrap_with_peft(model, config, seed=3)


@pytest.mark.drawn(1)
@pytest.mark.parity
@pytest.mark.parametrize("kind", ["full", "peft_model", "peft_config"])
def test_the_given_pytorch_model_is_trained_in_place(folder, tmp_path, kind):
    import peft
    from transformers import AutoModelForCausalLM

    base = model = AutoModelForCausalLM.from_pretrained(folder)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    if kind == "peft_model":
        model = peft.get_peft_model(model, lora)
    seen, given = [], []

    def own_weight():
        name = "layers.0.self_attn.q_proj.weight" if kind == "full" else "q_proj.lora_B.default.weight"
        return next(value.detach().numpy().copy() for each, value in base.named_parameters() if each.endswith(name))

    def reward(completions, **columns):
        seen.append(own_weight())
        return [float(text.count("a")) for text in completions]

    class Watch:
        def on_step_end(self, args, state, control, model, **more):
            seen.append(own_weight())
            given.append(model)

    config = lora if kind == "peft_config" else None
    args = a_config(tmp_path, max_steps=2, bf16=False)
    trainer = trl.GRPOTrainer(model, reward, args, PROMPTS, callbacks=[Watch()], peft_config=config)
    trained = trainer.model
    assert trained.get_base_model() is base if kind == "peft_config" else trained is model
    trainer.train()
    assert all(each is trained for each in given)
    first, second, third, last = seen  # the rewards and the end of two steps
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(second, third)
    assert not np.array_equal(third, last)
    np.testing.assert_array_equal(own_weight(), last)
    for expected, got in zip(
        trained_leaves(trainer.native.model), trained_leaves(read_torch_model(trained)), strict=True
    ):
        np.testing.assert_array_equal(expected, got)


@pytest.mark.heavy
def test_the_given_model_of_compat_is_trained_in_place(folder, tmp_path):
    model, seen = hf.AutoModelForCausalLM.from_pretrained(folder), []

    def query():
        return np.asarray(model.model.params["layers"][0]["q"]).copy()

    def reward(completions, **columns):
        seen.append(query())
        return [float(text.count("a")) for text in completions]

    before = query()
    trainer = trl.GRPOTrainer(model, reward, a_config(tmp_path, max_steps=2), PROMPTS)
    assert trainer.model is model
    trainer.train()
    np.testing.assert_array_equal(seen[0], before)
    assert not np.array_equal(seen[1], before)
    assert not np.array_equal(query(), seen[1])
    model.save_pretrained(tmp_path / "saved")
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").model.params["embed"]
    np.testing.assert_array_equal(saved, trainer.native.model.params["embed"])


def test_a_base_is_quantized_unless_it_is_loaded_already(folder, tmp_path):
    config, lora = (
        hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        hf.LoraConfig(r=2),
    )
    assert policy_of(str(folder), a_config(tmp_path), config, lora).weights == "nf4"
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.warns(CompatWarning, match="quantization_config changes nothing: the model is already loaded"):
        assert policy_of(loaded, a_config(tmp_path), config, lora).weights == "same"


def test_a_reference_with_another_meaning_than_trls_is_refused(folder, tmp_path):
    lora = {"r": 2, "target_modules": ["q_proj"]}
    model = hf.get_peft_model(hf.AutoModelForCausalLM.from_pretrained(folder), hf.LoraConfig(**lora))
    assert policy_of(model, a_config(tmp_path), None, None, beta=0.1).owner is model
    model.model = changed(model.model)
    assert policy_of(model, a_config(tmp_path), None, None).owner is model
    with pytest.raises(ValueError, match=r"beta is 0\.1, and the model's adapter was trained before"):
        trl.GRPOTrainer(model, count_a, a_config(tmp_path, beta=0.1), PROMPTS)


@pytest.mark.parity
def test_weights_of_a_compat_model_are_those_of_transformers(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    own = dict(model.named_parameters())
    assert own.keys() == dict(theirs.named_parameters()).keys()
    assert all(isinstance(value, torch.nn.Parameter) and value.requires_grad for value in own.values())
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in own.items())
    assert torch.equal(model.get_parameter("model.norm.weight"), theirs.model.norm.weight)
    assert torch.equal(model.lm_head.weight, theirs.lm_head.weight)
    with pytest.raises(AttributeError, match=r"no weight 'model.norm'; did you mean model.norm.weight"):
        model.get_parameter("model.norm")
    weight = own["model.norm.weight"]
    assert type(weight.clone()) is torch.Tensor
    with pytest.raises(RuntimeError, match="__set__ would change a copy of a weight"):
        weight.requires_grad = False
    with torch.no_grad(), pytest.raises(RuntimeError, match="add_ would change a copy"):
        weight.add_(1.0)
    with torch.no_grad(), pytest.raises(RuntimeError, match="__setitem__ would change a copy"):
        weight[0] = 1.0
