"""Other libraries' interfaces: their translation to groupax, warnings and refusals."""

import copy
import json
import pickle
import re
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import groupax.compat.easydel as ed
from groupax import Engine, SamplingParams, init_model, load_model
from groupax.compat import hf, trl
from groupax.compat.easydel.trainers import with_sampling
from groupax.compat.fields import CompatWarning
from groupax.compat.hf.model import DEFAULT_NEW_TOKENS, GENERATION
from groupax.models.lora import as_lora_config
from groupax.models.weights.casts import is_quantized
from groupax.models.weights.checkpoint import reshard
from groupax.parallel.mesh import make_mesh
from groupax.rollouts.collector import sampling_params
from groupax.runs.build import eval_params
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.training.test_trainer import PROMPTS, count_a

from .conftest import a_config, chat_tokenizer

# -- settings


@pytest.mark.parametrize(
    ("make", "wrong", "nearest"),
    [
        (trl.GRPOConfig, "num_generation", "num_generations"),
        (trl.GRPOConfig, "per_device_batch_size", "per_device_"),
        (ed.GRPOConfig, "num_return_sequence", "num_return_sequences"),
        (ed.GRPOConfig, "total_batchsize", "total_batch_size"),
    ],
)
def test_unknown_fields_fail_with_the_nearest_name(make, wrong, nearest):
    with pytest.raises(TypeError, match=f"no field '{wrong}'; did you mean {nearest}"):
        make(**{wrong: 1})
    config = make()
    with pytest.raises(TypeError, match=f"no field '{wrong}'"):
        setattr(config, wrong, 1)


@pytest.mark.parametrize("make", [trl.GRPOConfig, trl.RLOOConfig, trl.SFTConfig, ed.GRPOConfig])
def test_every_field_without_effect_warns_with_the_reason(make):
    fields = make.FIELDS
    for name, why in fields.inert.items():
        with pytest.warns(CompatWarning, match=f"{name}=.*changes nothing in groupax: ") as warned:
            make(**{name: "something else"})
        assert str(warned[0].message).endswith(why)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(**{name: fields.defaults[name]})  # as it is anyway


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"scale_rewards": False}, {"scale_rewards": "none"}),
        ({"warmup_steps": 0.1}, {"warmup_ratio": 0.1, "warmup_steps": 0}),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.5}},
         {"lr_scheduler_type": "cosine", "learning_rate_end": 0.5}),
        ({"lr_scheduler_kwargs": {"min_lr_rate": 0.5}, "learning_rate": 2e-4}, {"learning_rate_end": 1e-4}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}, {"warmup_steps": 3}),
        ({"max_grad_norm": None}, {"max_grad_norm": 0.0}),
        ({"max_grad_norm": 0, "beta": 0, "epsilon_high": 0, "epsilon": 0, "seed": 0},
         {"max_grad_norm": 0.0, "beta": 0.0, "epsilon_high": 0.0, "epsilon": 0.0, "seed": 0}),
        ({"top_k": -1, "min_p": 0, "warmup_steps": 0}, {"top_k": 0, "min_p": 0.0, "warmup_steps": 0}),
        ({"reward_weights": [0.0, 0.0]}, {"reward_weights": (0.0, 0.0), "reward_scope": "rollout"}),
        ({"run_name": "", "metric_for_best_model": "", "deepspeed": ""}, {"run_name": None, "mesh": None}),
        ({"eval_strategy": "steps", "eval_steps": 0, "logging_steps": 3}, {"eval_steps": 3}),
        ({"mask_truncated_completions": True}, {"mask_truncated_completions": ("length",)}),
        ({"max_completion_length": None, "generation_kwargs": {"max_tokens": 5}}, {"max_completion_length": 5}),
        ({"metric_for_best_model": "eval_loss"}, {"metric_for_best_model": "eval_loss", "greater_is_better": False}),
        ({"metric_for_best_model": "kl", "greater_is_better": False}, {"greater_is_better": False}),
        ({"top_p": None, "top_k": None}, {"top_p": 1.0, "top_k": 0, "eval_top_p": 1.0}),
        ({"bf16": True}, {"dtype": "bfloat16"}),
        ({"activation_checkpointing": True}, {"gradient_checkpointing": "full"}),
        ({"activation_checkpointing": False}, {"gradient_checkpointing": "none"}),
        ({"gradient_checkpointing": False}, {"gradient_checkpointing": "none"}),
        ({}, {"gradient_checkpointing": "auto", "dtype": "auto", "prompts_per_step": 1, "drop_last": True}),
        ({"eval_strategy": "steps", "eval_steps": 250}, {"eval_steps": 250}),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, {"eval_steps": 24, "save_steps": 24}),
        ({"save_strategy": "no"}, {"save_steps": 0, "do_last_save": False}),
        ({"max_prompt_length": 64}, {"max_prompt_length": 64, "prompt_overflow": "truncate_left"}),
        ({"generation_kwargs": {"top_p": 0.5, "max_new_tokens": 9}}, {"top_p": 0.5, "max_completion_length": 9}),
        ({"generation_kwargs": '{"min_p": 0.1}'}, {"min_p": 0.1}),
        ({"model_init_kwargs": {"attn_implementation": "eager"}}, {"attn_implementation": "plain"}),
        ({"model_init_kwargs": '{"attn_implementation": "flash_attention_2"}'}, {"attn_implementation": "auto"}),
        ({"shuffle_dataset": False}, {"prompt_order": "dataset"}),
        ({"num_train_epochs": 2, "disable_tqdm": True}, {"num_train_epochs": 2.0, "progress_bar": "none"}),
        ({"learning_rate": "1e-6", "num_iterations": "2"}, {"learning_rate": 1e-6, "num_iterations": 2}),
        ({"report_to": "tensorboard", "run_name": "a", "project": "b"},
         {"report_to": ("tensorboard",), "run_name": "a", "project": "b"}),
        ({"report_to": "none"}, {"report_to": ()}),
    ],
    ids=str,
)  # fmt: skip
def test_trl_settings_become_native_ones(settings, expected):
    config = trl.GRPOConfig("here", **settings).to_native(1, 24)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "message", "expected"),
    [
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 10},
            "'constant' has no warm-up",
            {"warmup_steps": 0, "warmup_ratio": 0.0},
        ),
        ({"loss_type": "cispo", "epsilon": 0.3}, "caps ratios at epsilon = 0.3, as TRL does", {"epsilon_high": 0.3}),
        ({"report_to": ["mlflow", "wandb"]}, "report_to mlflow: groupax reports to wandb", {"report_to": ("wandb",)}),
        ({"per_device_train_batch_size": 4}, "4 completions, .* steps_per_generation is 2, so that 2 steps train", {}),
    ],
    ids=str,
)
def test_settings_that_differ_from_trls_warn(settings, message, expected):
    with pytest.warns(CompatWarning, match=message):
        config = trl.GRPOConfig(**settings).to_native(1, 24)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"temperature": float("nan")}, "temperature must be a number of at most 1e.15, got nan; the default is 1.0"),
        ({"temperature": 0}, "greedy completions of one prompt are all the same"),
        ({"output_dir": ""}, "output_dir must not be an empty text"),
        ({"off_policy_mask_threshold": 0.0}, "by the rounding between sampling and training"),
        ({"num_generations_eval": 10**6}, r"\(eval_num_generations follows from num_generations_eval\)"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be a whole number between 1 and"),
        ({"per_device_train_batch_size": 10**7}, r"\(prompts_per_step follows from per_device_train_batch_size \*"),
        ({"per_device_train_batch_size": 6, "steps_per_generation": 1}, "6 completions.*not a multiple of num_gen"),
        ({"generation_batch_size": 12}, "must be a multiple of the completions of a micro-batch, 8"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "both set"),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 4}, "4 must be a multiple of .* 3, or with num_it"),
        (
            {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2},
            "end where generations do",
        ),
        ({"optim": "galore_adamw"}, "optim 'galore_adamw' is not supported; choose from adamw"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "are not supported; choose from min_lr"),
        ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"min_lr": 1e-7}}, "'constant' never reaches min_lr"),
        ({"vllm_mode": "serve"}, "vllm_mode must be 'server' or 'colocate', got 'serve'"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs has 'num_beams'; choose from temperature"),
        ({"generation_kwargs": {"do_sample": False}}, "nothing is learned; leave it out"),
        ({"eval_strategy": "steps", "eval_steps": 0.5}, "give a number of steps"),
    ],
    ids=str,
)
def test_what_trl_settings_cannot_become_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        trl.GRPOConfig(**settings).to_native()


@pytest.mark.parametrize("make", [trl.GRPOConfig, trl.RLOOConfig, trl.SFTConfig, ed.GRPOConfig])
def test_every_field_that_cannot_be_honoured_is_refused_with_the_remedy(make):
    for name, why in make.FIELDS.refused.items():
        make(**{name: make.FIELDS.defaults[name]})
        with pytest.raises(ValueError, match=f"{name}='something else' is not supported: {re.escape(why)}"):
            make(**{name: "something else"})


def test_evaluations_are_sampled_as_rollouts_are():
    cut = {"top_p": 0.9, "top_k": 50, "min_p": 0.05}
    for config in (trl.GRPOConfig(**cut, eval_strategy="steps"), ed.GRPOConfig(**cut, evaluation_steps=10)):
        native = config.to_native()
        assert native.eval_steps == 10
        assert eval_params(native) == sampling_params(native)
    more = {"num_generations_eval": 4, "generation_kwargs": {"temperature": 0.7, "top_k": 20, "max_new_tokens": 9}}
    native = trl.GRPOConfig(**cut, **more).to_native()
    assert eval_params(native) == replace(sampling_params(native), n=4)
    assert (native.eval_temperature, native.eval_top_k, native.eval_top_p) == (0.7, 20, 0.9)


@pytest.mark.parametrize(
    ("settings", "message", "expected"),
    [
        ({"vllm_server_host": "10.0.0.1"}, r"sampled by the server at http://10\.0\.0\.1:8000",
         {"rollout_servers": ("http://10.0.0.1:8000",), "rollout_correction": "sequence_mask"}),
        ({"vllm_mode": "server", "vllm_server_port": 9000}, r"server at http://127\.0\.0\.1:9000", {}),
        ({"vllm_server_host": ""}, "own engine", {"rollout_servers": (), "rollout_correction": "none"}),
        ({"vllm_tensor_parallel_size": 2}, "own engine", {"decoding_tp": 2}),
        ({"vllm_mode": "server", "vllm_tensor_parallel_size": 2}, "the server decides how", {"decoding_tp": 1}),
        ({"vllm_importance_sampling_mode": "token_truncate"}, "own engine",
         {"rollout_correction": "token_truncate", "rollout_correction_max": 3.0}),
        ({"vllm_importance_sampling_clip_max": 2.0}, "own engine",
         {"rollout_correction": "sequence_mask", "rollout_correction_max": 2.0}),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, "", {"regex": "[0-9]+", "rollout_correction": "sequence_mask"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_vllm_would_sample_groupax_or_a_server_does(settings, message, expected):
    with pytest.warns(CompatWarning) as warned:
        config = trl.GRPOConfig(**{"use_vllm": True, **settings}).to_native()
    assert any(re.search(message, str(each.message)) for each in warned)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "mesh"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "1,-1,1,1,1"),
        ({"fsdp": "full_shard auto_wrap"}, "1,-1,1,1,1"),
        ({"parallelism_config": SimpleNamespace(dp_replicate_size=2, dp_shard_size=4, tp_size=2)}, "2,4,1,2,1"),
        ({}, None),
    ],
    ids=str,
)
def test_settings_of_launchers_become_a_mesh(settings, mesh):
    config = trl.GRPOConfig(**settings).to_native()
    assert config.mesh == mesh
    assert ("kv_heads" in config.mesh_replicate) == (mesh is not None)


def test_the_replacement_of_launchers_is_reported():
    whole = init_model(TINY, mesh=make_mesh())
    with pytest.warns(CompatWarning, match=r"fsdp: .*no further options .*over the 4 devices .*= \(1,4,1,1,1\)"):
        trl.GRPOConfig(fsdp="full_shard").warn_about_mesh(reshard(whole, make_mesh((1, 4, 1, 1, 1))))


def test_easydel_settings_become_native_ones():
    given = {"model_name": "math", "save_directory": "gs://bucket/runs", "total_batch_size": 16, "report_steps": 2}
    given |= {"num_return_sequences": 4, "clip_grad": 1.0, "save_total_limit": 0, "log_steps": 5, "track_memory": True}
    given |= {"optimizer": ed.EasyDeLOptimizers.LION, "scheduler": ed.EasyDeLSchedulers.COSINE, "use_wandb": True}
    given |= {"learning_rate_end": 6e-7, "progress_bar_type": "json"}
    with pytest.warns(CompatWarning, match="report_steps=2 changes nothing"):
        config = ed.GRPOConfig(**given, wandb_name="first try").to_native()
    expected = {"report_to": ("wandb",), "run_name": "first try", "project": "EasyDeL-math", "track_memory": True}
    expected |= {"output_dir": "gs://bucket/runs/math", "prompts_per_step": 16, "num_generations": 4}
    expected |= {"optimizer": "lion", "lr_scheduler_type": "cosine", "learning_rate_end": 6e-7, "max_grad_norm": 1.0}
    expected |= {"progress_bar": "json", "logging_steps": 5, "save_total_limit": 0}
    assert {name: getattr(config, name) for name in expected} == expected
    with pytest.warns(CompatWarning, match="learning_rate_end=1e-07 changes nothing in groupax without a scheduler"):
        ed.GRPOConfig(learning_rate_end=1e-7).to_native()
    with pytest.raises(ValueError, match=r"optimizer 'adamww' is not supported; choose from .*did you mean adamw"):
        ed.GRPOConfig(optimizer="adamww").to_native()


def test_easydel_sampling_comes_from_the_config_and_then_from_the_inference():
    inference = ed.vInference(None, max_new_tokens=9, num_return_sequences=3, top_k=7, repetition_penalty=1.1)
    with pytest.warns(CompatWarning, match="top_k=5 overrides vInference's top_k=7"):
        config = with_sampling(ed.GRPOConfig(top_k=5, temperature=0.5), inference).to_native()
    assert (config.max_completion_length, config.num_generations, config.top_k) == (9, 3, 5)
    assert (config.temperature, config.repetition_penalty) == (0.5, 1.1)
    with pytest.raises(ValueError, match="greedy completions of a prompt do not differ"):
        ed.vInference(None, do_sample=False)
    with pytest.raises(TypeError, match="no setting 'max_new_token'; did you mean max_new_tokens"):
        ed.vInference(None, max_new_token=9)


# -- models


def test_what_scripts_say_to_a_model_before_training(folder):
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.warns(CompatWarning, match="use_cache=False changes nothing in groupax"):
        model.config.use_cache = False
    with pytest.warns(CompatWarning, match="set gradient_checkpointing in GRPOConfig"):
        model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    model.enable_input_require_grads()
    assert model.config.vocab_size == 13
    assert model.config.hidden_size == 32
    for copied in (copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))):
        assert (copied.vocab_size, copied.hidden_size) == (13, 32)
    with pytest.raises(AttributeError, match="num_hidden_layers of a loaded model's config cannot be set"):
        model.config.num_hidden_layers = 1


@pytest.mark.heavy
def test_a_model_with_the_methods_of_transformers_and_peft(folder, tmp_path, capsys):
    tokenizer = a_tokenizer(eos_token="<eos>", pad_token="<pad>")
    config = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    with pytest.warns(CompatWarning, match="device_map='auto' changes nothing"):
        model = hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="auto")
    adapted = hf.get_peft_model(model.train(), hf.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapted.print_trainable_parameters()
    assert "trainable params: 256" in capsys.readouterr().out
    adapted.save_pretrained(tmp_path / "adapter")
    base = hf.AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto")
    merged = hf.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().eval()
    assert merged.model.adapter is None
    merged.resize_token_embeddings(len(tokenizer))
    with pytest.raises(ValueError, match="has 99 tokens"):
        merged.resize_token_embeddings(99)
    tokenizer.padding_side = "left"
    inputs = tokenizer(["abc", "d"], return_tensors="np", padding=True)
    out = merged.generate(**inputs, max_new_tokens=5, do_sample=False, temperature=0.0)
    assert out.shape[0] == 2
    np.testing.assert_array_equal(out[:, :3], inputs["input_ids"])
    again = merged.generate(input_ids=np.array([[6]]), max_new_tokens=5)
    np.testing.assert_array_equal(out[1, 3 : 3 + again.shape[1] - 1], again[0, 1:])  # padding changes nothing
    with pytest.raises(TypeError, match="no argument 'max_new_token'"):
        merged.generate(**inputs, max_new_token=3)
    merged.save_pretrained(tmp_path / "merged", safe_serialization=True)
    quantized = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", quantization_config=config)
    quantized.save_pretrained(tmp_path / "merged_4bit")
    saved = json.loads((tmp_path / "merged_4bit" / "config.json").read_text())
    assert saved["quantization_config"]["load_in_4bit"]
    load_model(tmp_path / "merged_4bit")


SAID = {"do_sample": True, "temperature": 2.0, "top_k": 3, "min_p": 0.01, "max_new_tokens": 6}

SAID |= {"num_return_sequences": 2, "pad_token_id": 0}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("said", "given", "params"),
    [
        ({}, {}, {"max_tokens": 20, "temperature": 0.0}),
        ({}, {"do_sample": True, "top_k": 4}, {"max_tokens": 20, "top_k": 4}),
        (SAID, {}, {"n": 2, "max_tokens": 6, "temperature": 2.0, "top_k": 3, "min_p": 0.01}),
        (SAID, {"top_k": 0, "max_new_tokens": 7}, {"n": 2, "max_tokens": 7, "temperature": 2.0, "min_p": 0.01}),
        (SAID, {"do_sample": False, "num_return_sequences": 1}, {"max_tokens": 6, "temperature": 0.0}),
        ({"max_length": 12}, {}, {"max_tokens": 9, "temperature": 0.0}),
        ({"max_length": 12}, {"max_length": 10}, {"max_tokens": 7, "temperature": 0.0}),
    ],
    ids=str,
)
def test_generate_goes_by_arguments_then_by_the_models_files_then_by_transformers(folder, said, given, params):
    prompts = np.array([[3, 4, 5], [6, 7, 8]], np.int32)
    model = replace(load_model(folder), generation_config=said)
    groups = Engine.of(model).generate(list(prompts), SamplingParams(**params))
    rows = [sequence.tokens for group in groups for sequence in group]
    length = max(map(len, rows))
    fill = said.get("pad_token_id", model.hf_config["eos_token_id"])
    out = hf.CausalLM(model).generate(prompts, **given)
    np.testing.assert_array_equal(out[:, :3], np.repeat(prompts, params.get("n", 1), axis=0))
    assert out[:, 3:].tolist() == [[*row, *[fill] * (length - len(row))] for row in rows]


def test_where_completions_of_generate_end(folder):
    loaded, prompt = load_model(folder), np.array([[3, 4, 5]], np.int32)
    unlimited = hf.CausalLM(loaded).generate(prompt, max_new_tokens=8, eos_token_id=12)[0, 3:].tolist()
    ends = next(token for token in unlimited if token != 12)
    ended = unlimited[: unlimited.index(ends) + 1]
    model = hf.CausalLM(replace(loaded, generation_config={"eos_token_id": ends}))
    assert model.generate(prompt, max_new_tokens=8)[0, 3:].tolist() == ended
    assert model.generate(prompt, max_new_tokens=8, eos_token_id=[12])[0, 3:].tolist() == unlimited
    with pytest.raises(ValueError, match="have 3 tokens, so max_length=3 leaves no room"):
        model.generate(prompt, max_length=3)
    assert model.generate(prompt, max_length=9, max_new_tokens=1).shape == (1, 4)


@pytest.mark.parity
def test_defaults_of_generate_are_those_of_transformers():
    from transformers import GenerationConfig

    defaults = {**GenerationConfig().to_dict(), **GenerationConfig._get_default_generation_params()}
    assert defaults["max_length"] == DEFAULT_NEW_TOKENS  # which it adds to the prompt's
    assert {name: defaults.get(name) for name in GENERATION} == {**GENERATION, "max_length": 20}


QLORA = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def test_quantization_settings():
    with pytest.warns(CompatWarning, match="4-bit weights are nf4 with double quantization"):
        assert hf.base_weights({"load_in_4bit": True}) == "nf4"
    for ignored in ({"llm_int8_skip_modules": ["lm_head"]}, {"bnb_4bit_compute_dtype": "float16"}):
        with pytest.warns(CompatWarning, match=f"{next(iter(ignored))}=.* changes nothing in groupax"):
            assert hf.base_weights({**QLORA, **ignored}) == "nf4"
    assert hf.base_weights(hf.BitsAndBytesConfig(**QLORA)) == "nf4"
    with pytest.raises(ValueError, match="does not set load_in_4bit, the only quantization"):
        hf.base_weights({"load_in_8bit": True})
    with pytest.raises(TypeError, match="bnb_4bit_quant_typ"):
        hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_typ="nf4")
    with pytest.raises(ValueError, match="does not support the LoRA settings exclude_modules"):
        hf.LoraConfig(r=8, exclude_modules=["q_proj"])


def test_easydel_models(folder):
    config = ed.EasyDeLBaseConfigDict(
        mask_max_position_embeddings=512,
        attn_softmax_dtype=jnp.bfloat16,
        kvdtype=jnp.bfloat16,
        attn_mechanism=ed.AttentionMechanisms.VANILLA,
        gradient_checkpointing=ed.EasyDeLGradientCheckPointers.NOTHING_SAVEABLE,
    )
    load = partial(ed.AutoEasyDeLModelForCausalLM.from_pretrained, folder, auto_shard_model=True, config_kwargs=config)
    with pytest.warns(CompatWarning) as warned:
        model = load(sharding_axis_dims=(1, -1, 1, 1, 1), param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    text = " ".join(str(each.message) for each in warned)
    assert "changes nothing in groupax: attention weights are computed in float32" in text
    assert model.model.params["layers"][0]["gate"].addressable_shards[0].data.shape[1] * 4 == 32
    settings = {"gradient_checkpointing": "full", "kv_cache_dtype": "bfloat16", "dtype": "bfloat16"}
    assert model.trainer_settings == {**settings, "attn_implementation": "plain"}
    assert model.model.config.max_positions == 512
    assert model.model.params["embed"].dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="no argument 'sharding_axis'"):
        ed.AutoEasyDeLModelForCausalLM.from_pretrained(folder, sharding_axis=1)


# -- trainers


@pytest.mark.heavy
def test_a_trl_run_reports_trls_metrics(folder, tmp_path):
    drawn: dict[int, list[float]] = {}

    def letters(completions, trainer_state, **kwargs):
        values = [float(len(set(text))) for text in completions]
        drawn.setdefault(trainer_state.global_step, []).extend(values)
        return values

    config = a_config(tmp_path, max_steps=2, scale_rewards="batch", entropy_coef=0.01, mask_truncated_completions=True)
    trainer = trl.GRPOTrainer(str(folder), letters, config, PROMPTS)
    trainer.train()
    *lines, last = trainer.state.log_history
    assert last["train_loss"] == pytest.approx(np.mean([line["loss"] for line in lines]))
    for step, line in enumerate(lines):
        assert line["reward_std"] == pytest.approx(np.std(drawn[step], ddof=1))
        assert line["frac_reward_zero_std"] == float(np.std(drawn[step]) == 0)
        if line["loss_tokens"]:
            assert line["policy_loss"] == pytest.approx(line["loss"] + 0.01 * line["entropy"], abs=1e-6)


@pytest.mark.heavy
def test_a_trl_trainer_with_callbacks_and_the_run_state(folder, tmp_path):
    calls, states = [], []

    class Watch:
        def on_train_begin(self, args, state, control, **more):
            assert args.num_generations == 8
            assert more["processing_class"] is not None
            calls.append("begin")

        def on_log(self, args, state, control, logs, **more):
            calls.append(("log", state.global_step, "reward" in logs))

        def on_step_end(self, args, state, control, **more):
            control.should_training_stop = state.global_step == 2
            return control

        def on_epoch_end(self, args, state, control, **more):
            calls.append(("epoch", state.global_step))

    def reward(completions, trainer_state, **kwargs):
        states.append((trainer_state.global_step, trainer_state.max_steps))
        return [float(text.count("a")) for text in completions]

    trainer = trl.GRPOTrainer(str(folder), partial(reward), a_config(tmp_path), PROMPTS, callbacks=[Watch()])
    out = trainer.train()
    assert out.global_step == trainer.state.global_step == 2
    expected = ["begin", ("log", 1, True), ("log", 2, True), ("epoch", 2), ("log", 2, False)]
    assert calls == expected  # the last line is of the whole run
    assert states == [(0, 3), (1, 3)]
    assert [line["step"] for line in trainer.state.log_history] == [1, 2, 2]
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "notes.txt").is_file()
    np.testing.assert_array_equal(load_model(tmp_path / "saved").params["embed"], trainer.model.model.params["embed"])


@pytest.mark.heavy
def test_a_trl_trainer_adapts_a_quantized_base_and_evaluates(folder, tmp_path):
    config = a_config(tmp_path, max_steps=1, num_generations_eval=2)
    four_bits = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    lora = hf.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    trainer = trl.GRPOTrainer(
        str(folder), count_a, config, PROMPTS, PROMPTS[:2], quantization_config=four_bits, peft_config=lora
    )
    assert is_quantized(trainer.native.model.params)
    assert trainer.native.model.adapter.config == as_lora_config(lora)
    trainer.train()
    assert "eval_reward" in trainer.evaluate()
    trainer.save_model(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_an_adapter_is_not_asked_for_twice(folder, tmp_path):
    adapted = hf.get_peft_model(hf.AutoModelForCausalLM.from_pretrained(folder), hf.LoraConfig(r=4))
    make = partial(trl.GRPOTrainer, adapted, count_a, a_config(tmp_path), PROMPTS)
    with pytest.warns(CompatWarning, match="describes the adapter that the model already has"):
        make(processing_class=a_tokenizer(eos_token="<eos>"), peft_config=hf.LoraConfig(r=4))
    with pytest.raises(ValueError, match="already has an adapter, and peft_config describes another"):
        make(peft_config=hf.LoraConfig(r=8))
    dropping = hf.get_peft_model(hf.AutoModelForCausalLM.from_pretrained(folder), hf.LoraConfig(r=4, lora_dropout=0.1))
    with pytest.raises(ValueError, match="disable_dropout=True would disable the adapter's lora_dropout"):
        trl.GRPOTrainer(dropping, count_a, a_config(tmp_path, disable_dropout=True), PROMPTS)


def test_chat_template_arguments_reach_the_prompts(folder, tmp_path):
    prompts = [{"prompt": [{"role": "user", "content": "abc"}]}] * 2
    config = a_config(tmp_path, max_steps=1, chat_template_kwargs={"shout": True})
    trainer = trl.GRPOTrainer(str(folder), lambda completions: [0.0] * len(completions), config, prompts)
    assert trainer.processing_class.decode(trainer.native.prompts.token_ids[0]).replace(" ", "") == "abcji"


@pytest.mark.heavy
def test_an_easydel_trainer_with_columns_of_its_own(folder, tmp_path):
    tokenizer, seen = chat_tokenizer(), []

    def reward(prompts, completions, batch, **kwargs):
        golds = tokenizer.batch_decode(batch["gold_ids"], skip_special_tokens=True)
        seen.append((golds, prompts[0], completions[0][0]["role"]))
        return [float(index) for index in range(len(completions))]

    def tokenize(batch, tokenizer, tools):
        assert batch["prompt"][0] == "abci"  # rendered by then
        left = {"padding": "max_length", "padding_side": "left", "max_length": 12}
        made = tokenizer(batch["prompt"], **left, return_tensors="np")
        made["gold_ids"] = tokenizer(batch["gold"], return_tensors="np")["input_ids"]
        return made

    rows = [{"prompt": [{"role": "user", "content": "abc"}], "gold": "d"}] * 2
    config = ed.GRPOConfig(save_directory=str(tmp_path), model_name="run", total_batch_size=2, num_return_sequences=2)
    config.max_completion_length, config.max_training_steps, config.progress_bar_type = 8, 1, "none"
    model = ed.AutoEasyDeLModelForCausalLM.from_pretrained(folder)
    inference = ed.vInference(model, tokenizer)
    trainer = ed.GRPOTrainer(config, inference, model, reward, None, rows, None, tokenizer, tokenize)
    assert trainer.native.prompts.token_ids[0].tolist() == [3, 4, 5, 11]
    trainer.train()
    assert seen == [(["d"], rows[0]["prompt"], "assistant")] * 2
    trainer.save_pretrained(tmp_path)  # the parent of the run, as EasyDeL's scripts have it
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    assert (tmp_path / "model.safetensors").is_file()
