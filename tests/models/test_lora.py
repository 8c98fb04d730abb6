"""LoRA: what is trained, what stays, what is written, what is refused."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax import LoRAConfig, add_adapter, init_model, load_model, save_adapter, save_model
from groupax.models.adapted import AdaptedWeight, apply_adapter, without_changes
from groupax.models.decoder import logits
from groupax.models.lora import as_lora_config, count_params, residual
from tests.conftest import TINY, assert_trees_match
from tests.training.test_trainer import a_trainer, lines_of, trained

MODEL = {**TINY, "vocab_size": 13}


def a_base(seed=0, **settings):
    """A random model whose layers decide: with embeddings of its usual size no direction is much likelier."""
    model = init_model({**MODEL, **settings}, seed=seed)
    return replace(model, params={**model.params, "embed": 20.0 * model.params["embed"]})


def trained_randomly(model, seed=0):
    """The model with its adapter's weights moved at random."""
    rng = np.random.default_rng(seed)
    trained = jax.tree.map(
        lambda x: x + 0.1 * jnp.asarray(rng.normal(size=x.shape), jnp.float32), model.adapter.trained
    )
    adapter = replace(model.adapter, trained=trained)
    return replace(model, params=apply_adapter(residual(adapter), trained), adapter=adapter)


def all_logits(model):
    return np.asarray(logits(model.config, model.params, jnp.arange(12, dtype=jnp.int32)[None]))


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


# -- which weights


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "r must be between 1 and .*, got 0"),
        ({"lora_alpha": 0}, "lora_alpha must be between 1e-06 and 1e.06, got 0"),
        ({"lora_dropout": 1.0}, "lora_dropout must be at least 0 and below 1, got 1.0"),
        ({"target_modules": ()}, "target_modules is empty"),
        ({"target_modules": [3]}, "target_modules must be a text or a list with each a text, got"),
        ({"bias": "some"}, "bias must be one of none, all, lora_only, got 'some'"),
        ({"use_rslora": "yes"}, "must be true or false"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list with each a text"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": "LORA", "lora_bias": True}, "lora_bias=True"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules="),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must each be between 1 and .*'q_proj': 0"),
        ({"alpha_pattern": {"q_proj": "many"}}, "alpha_pattern must be a mapping of names to"),
        ({"layers_pattern": "layers"}, "layers_pattern .* without layers_to_transform"),
        ({"layers_to_transform": 0, "target_modules": ".*q_proj"}, "a regular expression, both choose layers"),
        ({"init_lora_weights": "pissa_niter_x"}, "'pissa_niter_x'; groupax supports True, 'pissa'"),
        ({"megatron_config": 0.0}, r"megatron_config=0\.0"),
        ({"inference_mode": True}, "freezes a new adapter"),
        ({"layers_to_transform": [], "alpha_pattern": {}, "layer_replication": None, "r": 0}, "r must be between"),
        *(({"init_lora_weights": how}, f"init_lora_weights is {how!r}; .* leave it at True") for how in (False, "eva")),
        (3, r"must be a LoRAConfig or a peft\.LoraConfig, got int"),
    ],
    ids=str,
)
def test_adapters_of_another_kind_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        as_lora_config(settings)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"target_modules": ("q_prj",)}, r"names 'q_prj', which is not a module .*did you mean q_proj"),
        ("llama", {"target_modules": "nothing"}, "'nothing' matches no module"),
        (
            "llama",
            {"target_modules": ("embed_tokens",)},
            "not a matrix of a layer; train it fully with modules_to_save",
        ),
        ("llama", {"modules_to_save": ("embed_tokens",)}, "also uses as its head"),
        ("llama", {"rank_pattern": {"q_prj": 4}}, "rank_pattern has 'q_prj', which matches no adapted module"),
        ("llama", {"alpha_pattern": {"(": 4}}, r"alpha_pattern '\(.*' cannot be used as a regular expression"),
        ("llama", {"layers_to_transform": (0, 2)}, r"layers_to_transform names \[2\]"),
        ("phi3", {}, r"_proj fused or stacked with .*; target_modules may name down_proj, o_proj$"),
    ],
)
def test_modules_that_cannot_be_adapted(family, settings, message):
    with pytest.raises(ValueError, match=message):
        add_adapter(init_model({**TINY, "model_type": family}), LoRAConfig(**settings))


# -- the arrays


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_new_adapter_changes_nothing_and_shares_the_base(tiny_model, use_dora):
    model = add_adapter(tiny_model, LoRAConfig(r=4, use_dora=use_dora))
    np.testing.assert_array_equal(all_logits(model), all_logits(tiny_model))
    assert model.params["layers"][0]["q"].base is tiny_model.params["layers"][0]["q"]
    assert model.params["embed"] is tiny_model.params["embed"]
    a = model.adapter.trained["layers"][0]["down"].a
    assert a.shape == (4, 64)
    assert 0.9 / 8 < np.abs(a).max() <= 1 / 8  # uniform within 1 / sqrt(64)
    with pytest.raises(ValueError, match="has an adapter already"):
        add_adapter(model, LoRAConfig())


@pytest.mark.heavy
def test_an_adapter_of_a_mixtures_dense_layers_survives_the_disk(tmp_path):
    """Its feed-forward part has the names of experts, which are not adapted."""
    mixture = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}
    mixture |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    save_model(init_model({**TINY, **mixture}), tmp_path / "base")
    model = trained_randomly(add_adapter(load_model(tmp_path / "base"), LoRAConfig(r=3)))
    save_adapter(model, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {"q_proj", "model.layers.0.mlp.gate_proj"} <= set(settings["target_modules"])
    np.testing.assert_array_equal(all_logits(load_model(tmp_path / "adapter")), all_logits(model))


@pytest.mark.heavy
def test_an_adapter_survives_the_disk(tmp_path):
    save_model(init_model(TINY), tmp_path / "base")
    settings = {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["model.norm"]}
    lora = as_lora_config({"r": np.int64(3), "lora_alpha": 5, **settings})
    model = trained_randomly(add_adapter(load_model(tmp_path / "base"), lora))
    save_adapter(model, tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        ".groupax_files.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    again = load_model(tmp_path / "adapter")
    np.testing.assert_array_equal(all_logits(again), all_logits(model))
    assert again.adapter.config == lora
    assert again.adapter.base_name == str(tmp_path / "base")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"the base of the adapter in .* cannot be loaded"):
        load_model(tmp_path / "adapter")
    np.testing.assert_array_equal(
        all_logits(load_model(tmp_path / "adapter", base=tmp_path / "moved")), all_logits(model)
    )
    with pytest.raises(ValueError, match="is a model and not an adapter"):
        load_model(tmp_path / "moved", base=tmp_path / "moved")


# -- training


@pytest.mark.drawn(2, "learns")
@pytest.mark.heavy
@pytest.mark.parametrize(
    "kind",
    # at temperature 1 this model hardly ever tries anything else, and learns by luck
    [{}, {"use_dora": True, "init_lora_weights": "pissa", "scan_layers": True, "temperature": 2.0}],
    ids=str,
)
def test_only_the_adapter_is_trained_and_it_learns(tmp_path, kind):
    model = a_base()
    before = [x.copy() for x in leaves(model.params)]
    trainer = a_trainer(tmp_path, model=model, lora_r=4, learning_rate=1e-2, max_steps=32, beta=1e-3, **kind)
    num_trained = count_params(model.config, trainer.model.adapter.config)[0]
    assert sum(x.size for x in leaves(trainer.learner.state.params)) == num_trained
    assert sum(x.size for x in leaves(trainer.learner.state.opt_state)) < 2 * num_trained + 8
    trainer.train()
    assert_trees_match(before, leaves(without_changes(trainer.learner.frozen)))
    assert_trees_match(before, leaves(trainer.learner.reference))
    held = map(jax.tree.leaves, (trainer.learner.reference, without_changes(trainer.learner.frozen)))
    assert all(reference is base for reference, base in zip(*held, strict=True)), "no copy of the base"
    assert trainer.learner.reference["embed"] is model.params["embed"], "no copy of the base"
    lines = lines_of(tmp_path)
    assert lines[0]["reward"] < 0.3
    assert lines[-1]["reward"] > 0.7
    assert abs(lines[0]["kl"]) < 1e-7 < lines[-1]["kl"]
    assert max(line["rollout/logp_diff_max"] for line in lines) < 1e-5
    files = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"}
    assert "model.safetensors" not in files


@pytest.mark.heavy
def test_everything_that_an_adapter_can_train_is_trained(tmp_path):
    model = init_model({**MODEL, "model_type": "qwen2", "tie_word_embeddings": False})
    args = {"lora_r": 2, "lora_target_modules": ("q_proj",), "lora_bias": "all", "learning_rate": 1e-2}
    args |= {"lora_modules_to_save": ("lm_head", "model.norm"), "max_steps": 2, "weight_decay": 0.1, "use_dora": True}
    args |= {"lora_rank_pattern": {"0.self_attn.q_proj": 3}, "lora_alpha_pattern": {"1.self_attn.q_proj": 9.0}}
    trainer = a_trainer(tmp_path, model=model, **args)
    start = jax.device_get(trainer.learner.state.params)
    trainer.train()
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), start, jax.device_get(trainer.learner.state.params))
    k_biases = [layer.pop("k_bias") for layer in moved["layers"]]  # the softmax does not see a change of them
    assert all(jax.tree.leaves(moved))
    assert len(k_biases) == 2
    policy = trainer.learner.policy
    assert isinstance(policy["layers"][0]["q"], AdaptedWeight)
    np.testing.assert_array_equal(policy["head"], trainer.learner.state.params["head"])


@pytest.mark.drawn(4, "resume")
@pytest.mark.heavy
def test_an_adapter_goes_on_where_it_was(tmp_path):
    save_model(init_model(MODEL, seed=0), tmp_path / "base")
    first = trained(tmp_path, model=str(tmp_path / "base"), lora_r=4, learning_rate=3e-2)
    again = a_trainer(tmp_path / "again", model=str(tmp_path / "run" / "model"), max_steps=1, learning_rate=1e-3)
    assert_trees_match(leaves(first.learner.state.params), leaves(again.learner.state.params))
    again.train()
    config = json.loads((tmp_path / "again" / "run" / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    with pytest.raises(ValueError, match="has an adapter already; merge it first"):
        a_trainer(tmp_path / "both", model=str(tmp_path / "run" / "model"), lora_r=4)


@pytest.mark.optimized
@pytest.mark.heavy
def test_low_rank_changes_in_bfloat16(tmp_path):
    a_trainer(tmp_path, lora_r=4, dtype="bfloat16", decoding_weights="bfloat16", rollout_correction="token_truncate")
    trainer = trained(tmp_path, lora_r=4, dtype="bfloat16", max_steps=2)
    assert trainer.learner.policy["layers"][0]["q"].change.a.dtype == jnp.bfloat16
    assert trainer.learner.frozen["embed"].dtype == jnp.bfloat16
    assert trainer.learner.state.params["layers"][0]["q"].a.dtype == jnp.float32


# -- dropout


@pytest.mark.long
def test_dropout_does_not_depend_on_micro_batches(tmp_path):
    results = {}
    for name, options in (("whole", {}), ("small", {"micro_batch_tokens": 16}), ("never", {"share_prefix": "never"})):
        trainer = trained(tmp_path / name, lora_r=4, lora_dropout=0.5, optimizer="sgd", max_steps=2, **options)
        results[name] = leaves(trainer.learner.state.params)
    for other in ("small", "never"):
        assert_trees_match(results["whole"], results[other], atol=1e-7, err_msg=other)
    without = trained(tmp_path / "without", lora_r=4, optimizer="sgd", max_steps=2)
    assert any((a != b).any() for a, b in zip(results["whole"], leaves(without.learner.state.params), strict=True))


def test_the_inputs_that_are_left_out():
    from groupax.models.adapted import Dropout

    lora = LoRAConfig(r=4, lora_dropout=0.25)
    model = add_adapter(init_model(TINY), lora)
    tokens = jnp.array([5, 6, 5], jnp.uint32)
    dropout = Dropout(jax.random.key(0), tokens, np.float32(0.25))
    params = apply_adapter(model.adapter.frozen, model.adapter.trained, dropout)
    from groupax.models.adapted import _apply_dropout

    masks = [
        np.asarray(_apply_dropout(jnp.ones((3, 4000)), params["layers"][i][name].dropout))
        for i, name in ((0, "q"), (1, "q"))
    ]
    assert set(np.unique(masks[0])) == {0.0, np.float32(1 / 0.75)}
    assert abs((masks[0] == 0).mean() - 0.25) < 0.02
    np.testing.assert_array_equal(masks[0][0], masks[0][2])
    assert (masks[0][0] != masks[0][1]).any()
    assert (masks[0] != masks[1]).any()
