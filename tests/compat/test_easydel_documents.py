"""EasyDeL 0.3.0's own way to write scripts, with groupax.compat.easydel in its place."""

import json

import pytest

import groupax.compat.easydel as ed
from groupax.compat.easydel.infra.elarge import eLargeModel
from groupax.compat.easydel.trainers import GRPOConfig

ROWS = [{"prompt": "abc", "answer": "d"}] * 2
TRAINER = {
    "trainer_type": "grpo",
    "num_return_sequences": 4,
    "max_training_steps": 1,
    "total_batch_size": 2,
    "max_length": 12,
    "max_prompt_length": 8,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
    "generation_temperature": 0.6,
    "progress_bar_type": "none",
}


def reward(prompts, completions, **kwargs):
    return [float(text.count("a")) for text in completions]


def _described(folder, tmp_path, **sections):
    loader = {"dtype": "bf16", "param_dtype": "fp32", "precision": "fastest"}
    sharding = {"axis_dims": (-1, 1, 1, 1, 1), "axis_names": ("dp", "fsdp", "ep", "tp", "sp"), "auto_shard_model": True}
    values = {"freq_max_position_embeddings": 12, "mask_max_position_embeddings": 12, "attn_mechanism": "auto"}
    return {
        "model": {"name_or_path": str(folder), "tokenizer": str(folder), "task": "auto-bind"},
        "loader": loader,
        "sharding": sharding,
        "base_config": {"values": values},
        "trainer": {**TRAINER, "save_directory": str(tmp_path)},
        **sections,
    }


@pytest.mark.parametrize("suffix", [None, "json", "yaml"])
def test_a_described_model_makes_the_trainer(folder, tmp_path, suffix):
    described = _described(folder, tmp_path)
    if suffix is not None:
        path = tmp_path / f"run.{suffix}"
        path.write_text(json.dumps(described))  # which is YAML too
        described = path
    trainer = eLargeModel(described).build_trainer(ROWS, reward_funcs=reward)
    native = trainer.native.args
    assert (native.dtype, native.num_generations, native.max_completion_length) == ("bfloat16", 4, 4)
    assert (native.temperature, native.lr_scheduler_type, native.warmup_ratio) == (0.6, "cosine", 0.03)
    assert native.loss_type == "dapo"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"modle": {}}, "no 'modle'; it has .*did you mean model"),
        ({"sharding": {"axis_dim": 1}}, "section sharding of eLargeModel has no 'axis_dim'; .*did you mean axis_dims"),
        ({"model": {}}, "needs name_or_path"),
        ({"trainer": {"trainer_type": "dpo"}}, "trainer_type 'dpo' is not a trainer"),
    ],
)
def test_a_description_with_faults_is_refused(folder, tmp_path, sections, message):
    with pytest.raises(ValueError, match=message):
        eLargeModel(_described(folder, tmp_path, **sections)).build_trainer(ROWS, reward_funcs=reward)


def test_lengths_and_optimizers_of_easydel_become_native_ones():
    config = GRPOConfig(max_length=4096, max_prompt_length=1024, extra_optimizer_kwargs={"b1": 0.8, "eps": 1e-6})
    native = config.to_native()
    assert (native.max_completion_length, native.adam_beta1, native.adam_epsilon) == (3072, 0.8, 1e-6)
    assert (native.temperature, native.top_p, native.top_k) == (1.0, 1.0, 0)
    with pytest.raises(ValueError, match="max_training_steps=0 trains nothing; leave it out"):
        GRPOConfig(max_training_steps=0).to_native()
    assert GRPOConfig(max_steps=3).max_steps == 3
    with pytest.raises(ValueError, match="max_length 100 is too short for max_prompt_length 512"):
        GRPOConfig(max_length=100).to_native()
    with pytest.raises(ValueError, match="extra_optimizer_kwargs has 'beta1'"):
        GRPOConfig(extra_optimizer_kwargs={"beta1": 0.9}).to_native()
    assert ed.GRPOConfig is GRPOConfig
