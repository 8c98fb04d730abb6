"""Subclasses of TRL's trainer: overrides that take part in a run, and those that are refused."""

import json
import re

import pytest

from groupax.compat import trl
from groupax.compat.trl.base import REFUSED
from tests.training.test_trainer import PROMPTS

from .conftest import a_config


def count_a(completions, **columns):
    """Rewards the letter a."""
    return [float(text.count("a")) for text in completions]


def trainer_of(cls, folder, tmp_path):
    small = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "max_steps": 2}
    return cls(str(folder), count_a, a_config(tmp_path, **small), PROMPTS)


class Adding(trl.GRPOTrainer):
    """Adds to the log."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.lines = []

    def log(self, logs, start_time=None):
        self.lines.append(dict(logs))
        super().log({**logs, "own/metric": 7.5}, start_time)


@pytest.mark.heavy
def test_an_override_of_the_log_takes_part(folder, tmp_path):
    trainer = trainer_of(Adding, folder, tmp_path)
    trainer.train()
    assert [line["own/metric"] for line in trainer.state.log_history] == [7.5, 7.5, 7.5]
    assert len(trainer.lines) == 3
    assert "train_runtime" in trainer.lines[-1]
    [metrics] = (tmp_path / "run").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["own/metric"] for line in lines] == [7.5, 7.5]


def test_overrides_that_would_never_be_called_are_refused_by_name():
    for name, remedy in REFUSED.items():
        cls = type("MyTrainer", (trl.GRPOTrainer,), {name: lambda self, *arguments, **named: None})
        message = f"MyTrainer overrides {name}, which groupax would never call: {remedy}"
        with pytest.raises(ValueError, match=re.escape(message)):
            cls("no/model", count_a, trl.GRPOConfig("x"), PROMPTS)


def test_an_override_of_a_mixin_is_refused_by_name():
    mixin = type("Mixin", (), {"compute_loss": lambda self, model, inputs: 0.0})
    with pytest.raises(ValueError, match="Mixin overrides compute_loss"):
        type("Mixed", (mixin, trl.GRPOTrainer), {})("no/model", count_a, trl.GRPOConfig("x"), PROMPTS)


@pytest.mark.parametrize(("name", "setting"), [("evaluate", "eval_strategy"), ("save_model", "save_strategy")])
def test_an_override_that_only_the_script_calls_is_refused_where_the_run_would(name, setting):
    cls = type("MyTrainer", (trl.GRPOTrainer,), {name: lambda self: None})
    with pytest.raises(ValueError, match=f"MyTrainer overrides {name}, .*{setting} is 'steps'"):
        cls("no/model", count_a, trl.GRPOConfig("x", **{setting: "steps"}), PROMPTS)


def test_methods_that_only_scripts_call(folder, tmp_path):
    trainer = trainer_of(trl.GRPOTrainer, folder, tmp_path)
    callback = object()
    trainer.add_callback(callback)
    trainer.remove_callback(callback)
    assert trainer.callbacks == []
    trainer.log({"mine": 1})
    assert trainer.state.log_history[-1]["mine"] == 1
    with pytest.raises(TypeError, match="push_to_hub has no argument 'revision'"):
        trainer.push_to_hub(revision="branch")
