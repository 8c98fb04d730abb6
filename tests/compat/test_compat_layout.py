"""Folders of TRL: an output folder is a model, `checkpoint-N/` are models that a run continues from."""

import json
from pathlib import Path

import numpy as np
import pytest

from groupax import load_model
from groupax.compat import trl
from groupax.compat.trl.layout import check_output_dir, checkpoint_to_resume
from groupax.runs.checkpoints.choose import split_path, store_of
from groupax.runs.checkpoints.store import HF
from groupax.runs.report import read_run
from groupax.satellites.view.runs import Runs
from tests.training.test_trainer import PROMPTS

from .conftest import a_config


def letters(completions, **columns):
    return [float(text.count("a")) for text in completions]


def a_trainer(folder, tmp_path, callbacks=(), eval_dataset=None, **settings):
    args = a_config(
        tmp_path, **{"save_strategy": "steps", "bf16": False, "output_dir": str(tmp_path / "out"), **settings}
    )
    return trl.GRPOTrainer(str(folder), letters, args, PROMPTS, eval_dataset, callbacks=list(callbacks))


def checkpoints(tmp_path):
    return sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))


def weights(folder):
    return np.asarray(load_model(folder).params["layers"][0]["q"])


class Watch:
    """A callback that notes checkpoints with the policy of their time, and may ask for things."""

    def __init__(self, asks=None):
        self.asks, self.saved, self.evaluated = asks or {}, {}, []

    def on_step_end(self, args, state, control, **more):
        for name in self.asks.get(state.global_step, ()):
            setattr(control, name, True)

    def on_save(self, args, state, control, model, **more):
        assert Path(args.output_dir, f"checkpoint-{state.global_step}").is_dir()
        self.saved[state.global_step] = np.asarray(model.model.params["layers"][0]["q"]).copy()

    def on_evaluate(self, args, state, control, **more):
        self.evaluated.append(state.global_step)


@pytest.mark.heavy
def test_checkpoints_are_models_with_the_state_of_the_trainer(folder, tmp_path):
    watch = Watch()
    trainer = a_trainer(folder, tmp_path, [watch], save_steps=2)
    trainer.train()
    trainer.save_model()
    out = tmp_path / "out"
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-3"]  # the last step is saved too
    assert [*watch.saved] == [2, 3]
    for step, expected in watch.saved.items():
        np.testing.assert_array_equal(weights(out / f"checkpoint-{step}"), expected)
    np.testing.assert_array_equal(weights(out), watch.saved[3])
    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"], state["best_model_checkpoint"]) == (2, 3, None)
    assert [line["step"] for line in state["log_history"]] == [1, 2]
    assert (out / "groupax" / "metrics.jsonl").is_file()
    names = {path.name for path in out.iterdir()} - {".groupax_files.json"}
    model = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == {*model, "chat_template.jinja", "groupax", "checkpoint-2", "checkpoint-3"}
    for run in (out, out / "groupax"):  # as commands find them
        assert store_of(str(run), tmp_path).steps() == [2, 3]
        assert len(read_run(run).metrics) == 3
        runs = Runs([run, tmp_path])
        runs.refresh()
        assert [*runs.named()] == ["out/groupax"]

    trainer = a_trainer(folder, tmp_path, save_steps=2, max_steps=4, learning_rate=0.0)
    assert trainer.train(resume_from_checkpoint=str(out / "checkpoint-2")).global_step == 4
    assert [line["step"] for line in trainer.state.log_history] == [1, 2, 3, 4, 4]
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]  # that of step 3 was of another future
    np.testing.assert_array_equal(weights(out / "checkpoint-2"), watch.saved[2])
    np.testing.assert_array_equal(weights(out / "checkpoint-4"), watch.saved[2])
    assert (out / "groupax" / "checkpoint-3.aside").is_dir()
    trainer = a_trainer(folder, tmp_path, save_steps=2, max_steps=6)
    trainer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in trainer.state.log_history] == [1, 2, 3, 4, 5, 6, 6]

    a_trainer(folder, tmp_path, save_steps=2, max_steps=2).train()  # another run
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    assert sorted(path.name for path in (tmp_path / "out" / "groupax.1").glob("checkpoint-?")) == [
        "checkpoint-2", "checkpoint-4", "checkpoint-6",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"contains .*; a model never overwrites its own source"):
        a_trainer(out / "checkpoint-2", tmp_path)


@pytest.mark.heavy
def test_callbacks_may_ask_for_checkpoints_and_the_best_one_is_loaded_at_the_end(folder, tmp_path):
    watch = Watch({1: ["should_save", "should_evaluate"]})
    settings = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "num_generations_eval": 2}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    trainer = a_trainer(folder, tmp_path, [watch], PROMPTS[:1], **settings)
    trainer.train()
    assert [*watch.saved] == watch.evaluated == [1, 2]
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    best = 1 + int(np.argmin(losses))
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out" / f"checkpoint-{best}")
    np.testing.assert_array_equal(trainer.model.model.params["layers"][0]["q"], watch.saved[best])


def test_output_folders_with_models_of_other_programs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="output_dir gs://bucket/run is a bucket, and TRL's layout needs a local"):
        check_output_dir("gs://bucket/run")
    check_output_dir(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{}")
    check_output_dir(tmp_path)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has checkpoint-3, config\.json, which groupax did not write"):
        check_output_dir(tmp_path)


def test_what_a_run_may_continue_from(tmp_path):
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True: .* has no checkpoint"):
        checkpoint_to_resume(True, tmp_path)
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"groupax did not write.*pass it as model"):
        checkpoint_to_resume(str(tmp_path / "checkpoint-5"), tmp_path)
    for step in (5, 12):
        (tmp_path / HF.name_of(step) / HF.inside).mkdir(parents=True)
    assert checkpoint_to_resume(True, tmp_path) == str(tmp_path / "checkpoint-12")
    assert checkpoint_to_resume("there/checkpoint-5", tmp_path) == "there/checkpoint-5"
    assert split_path("there/checkpoint-5/") == ("there", 5)
    assert split_path("checkpoint-5") == (".", 5)


@pytest.mark.parametrize("settings", [{"save_strategy": "best"}, {"load_best_model_at_end": True}], ids=str)
def test_the_best_checkpoint_needs_evaluations(settings):
    with pytest.raises(ValueError, match="the best checkpoint needs evaluations; set eval_strategy"):
        trl.GRPOConfig("here", **settings).to_native()
    native = trl.GRPOConfig("here", eval_strategy="steps", **settings).to_native()
    assert (native.metric_for_best_model, native.greater_is_better) == ("eval_loss", False)
