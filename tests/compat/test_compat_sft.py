"""TRL's `SFTTrainer` and `SFTConfig` in `compat`: the same losses as TRL's, the same folders, and what is refused."""

import functools
import json

import numpy as np
import pytest

from groupax import init_model
from groupax.compat import hf, trl
from groupax.data.examples import visit_order
from groupax.models.weights.casts import is_quantized
from tests.conftest import SHARED, TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.training.test_sft import EXAMPLES

STORIES, GSM8K = SHARED / "models" / "stories260K", SHARED / "data" / "gsm8k" / "train.jsonl"


def a_config(tmp_path, **settings):
    common = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1}
    return trl.SFTConfig(str(tmp_path / "out"), **{**common, "disable_tqdm": True, "save_strategy": "no", **settings})


@functools.cache
def small_model():
    return init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1}, seed=0)


def a_trainer(tmp_path, dataset=EXAMPLES, kind=trl.SFTTrainer, eval_dataset=None, settings=(), **arguments):
    arguments = {"model": small_model(), "processing_class": a_tokenizer(eos_token="<eos>"), **arguments}
    config = a_config(tmp_path, **dict(settings))
    return kind(args=config, train_dataset=dataset, eval_dataset=eval_dataset, **arguments)


def test_settings_become_native_ones(tmp_path):
    given = {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "max_length": 64, "packing": True, "data_seed": 7}
    given |= {"packing_strategy": "wrapped", "dataloader_drop_last": True, "train_sampling_strategy": "sequential"}
    given |= {"loss_type": "dft", "eval_strategy": "epoch", "save_strategy": "epoch", "dataset_text_field": "story"}
    native = a_config(tmp_path, **given).to_native(num_devices=2, steps_per_epoch=5)
    assert (native.batch_size, native.max_length, native.packing_strategy) == (24, 64, "wrapped")
    assert (native.seed, native.example_order, native.drop_last, native.loss_type) == (7, "dataset", True, "dft")
    assert (native.eval_steps, native.save_steps, native.dataset_text_field) == (5, 5, "story")


@pytest.mark.heavy
def test_it_trains_evaluates_resumes_and_writes_trl_s_folders(tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = a_trainer(tmp_path, eval_dataset=EXAMPLES[:3], settings=settings)
    assert trainer.train().global_step == 4
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert trainer.evaluate(EXAMPLES[:2])["eval_loss"] > 0
    assert trainer.evaluate()["eval_loss"] == [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x][1]
    trainer.save_model()
    out = tmp_path / "out"
    for folder in (out, out / "checkpoint-2", out / "checkpoint-4"):
        assert (folder / "model.safetensors").is_file()
    assert json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
    second = a_trainer(tmp_path, eval_dataset=EXAMPLES[:3], settings={**settings, "max_steps": 6})
    second.train(resume_from_checkpoint=str(out / "checkpoint-4"))
    assert second.native.cursor.step == 6
    assert [line["step"] for line in second.state.log_history if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_rows_take_trl_s_forms(tmp_path):
    texts = a_trainer(tmp_path, formatting_func=lambda row: row["prompt"] + row["completion"])
    assert texts.native.first_prompt == "abcab"


def test_shuffled_examples_have_the_order_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(EXAMPLES)
    trainer = a_trainer(tmp_path, rows, settings={"shuffle_dataset": True, "seed": 3})
    plain = a_trainer(tmp_path / "plain", rows.shuffle(seed=3))
    ids = [[each.ids.tolist() for [each] in own.native.examples.sequences] for own in (trainer, plain)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1 is not supported: the loss is that of"),
        ({"eval_packing": True}, {}, "evaluations are packed like the training set"),
        ({"train_sampling_strategy": "group_by_length"}, {}, "lengths need no grouping"),
        ({"dataset_kwargs": {"add_special_tokens": False}}, {}, "examples with input_ids are taken as they are"),
        ({"eos_token": "<end>"}, {}, "set the attribute eos_token of the tokenizer"),
        ({"loss_type": "mse"}, {}, "loss_type must be one of nll, dft"),
        ({}, {"data_collator": print}, "data_collator is not supported: examples are packed without padding"),
        ({"completion_only_loss": True}, {"formatting_func": str}, "texts, which have no completions"),
        ({"shuffle_dataset": True}, {"dataset": iter(())}, "a stream has no length; give rows"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_remedy(tmp_path, settings, arguments, message):
    with pytest.raises(ValueError, match=message):
        a_trainer(tmp_path, settings=settings, **arguments)


def test_an_override_that_is_never_called_is_refused(tmp_path):
    own = type("Own", (trl.SFTTrainer,), {"compute_loss": lambda self, *values: None})
    with pytest.raises(ValueError, match="Own overrides compute_loss, which groupax would never call"):
        a_trainer(tmp_path, kind=own)


def test_a_base_is_quantized_while_the_native_trainer_loads_it(folder, tmp_path):
    quantized = {
        "quantization_config": hf.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
        "peft_config": hf.LoraConfig(r=2),
    }
    trainer = a_trainer(tmp_path, model=str(folder), **quantized)
    assert trainer.native.args.base_weights == "nf4"
    assert is_quantized(trainer.native.model.params)


def test_a_model_that_has_an_adapter_is_trained_in_place(tmp_path):
    model = hf.get_peft_model(hf.CausalLM(small_model()), hf.LoraConfig(r=2, lora_alpha=4))
    trainer = a_trainer(tmp_path, model=model)
    assert trainer.model is model
    assert trainer.native.model.adapter.config.r == 2


@pytest.mark.parity
def test_the_order_is_that_of_accelerate_s_sampler():
    torch = pytest.importorskip("torch")
    data_loader = pytest.importorskip("accelerate.data_loader")
    sampler = data_loader.SeedableRandomSampler(range(9), data_seed=42)
    visits = [index for epoch in range(3) for index in (sampler.set_epoch(epoch) or list(sampler))]
    assert visit_order(9, 0, 27, 42, "seeded_by_epoch") == visits
    assert torch


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not STORIES.is_dir() or not GSM8K.is_file(), reason=f"needs {STORIES} and {GSM8K}")
def test_losses_are_those_of_trl_step_by_step(tmp_path):
    theirs, datasets, torch = (pytest.importorskip(name) for name in ("trl", "datasets", "torch"))
    torch.set_num_threads(1)
    lines = map(json.loads, GSM8K.read_text().splitlines()[:15])
    rows = [{"prompt": f"{line['question']}\n", "completion": line["answer"]} for line in lines]
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"num_train_epochs": 2, "max_length": 128, "learning_rate": 1e-3, "logging_steps": 1, "eval_steps": 4}
    settings |= {"bf16": False, "disable_tqdm": True, "save_strategy": "no", "eval_strategy": "steps"}
    settings["gradient_checkpointing"] = False
    logs = []
    for library, more in ((theirs, {"use_cpu": True, "model_init_kwargs": {"dtype": "float32"}}), (trl, {})):
        config = library.SFTConfig(str(tmp_path / library.__name__), **settings, **more)
        data = datasets.Dataset.from_list(rows)
        trainer = library.SFTTrainer(str(STORIES), config, train_dataset=data, eval_dataset=data.select(range(7)))
        trainer.train()
        logs.append(trainer.state.log_history)
    for name in ("loss", "grad_norm", "learning_rate", "num_tokens"):
        expected, found = ([line[name] for line in log if name in line] for log in logs)
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4, err_msg=name)
