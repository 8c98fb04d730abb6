"""What scripts of TRL do with evaluations, streams, logs and reports of a trainer."""

import json

import numpy as np
import pytest

from groupax.compat import trl
from groupax.compat.callbacks import CallbackListener, State
from groupax.compat.trl.base import BaseTrainer
from groupax.events import RunEnded, RunStarted, StepEnded
from tests.training.test_trainer import PROMPTS, count_a

from .conftest import a_config


def a_trainer(folder, tmp_path, eval_dataset=None, callbacks=None, **settings):
    config = a_config(tmp_path, **{"logging_steps": 2, **settings})
    return trl.GRPOTrainer(str(folder), count_a, config, PROMPTS, eval_dataset, callbacks=callbacks)


def test_the_last_line_of_a_log_is_about_the_run_and_the_steps_since_the_line_before(tmp_path):
    seen = []

    class Watch:
        def on_log(self, args, state, control, logs, **more):
            seen.append(logs)

        def on_train_end(self, args, state, control, **more):
            seen.append("end")

    state = State(logging_steps=2)
    listener = CallbackListener([Watch], None, 2, state, {}, 8, lambda line: listener.record(3, line))
    listener(RunStarted(0, 3))
    for step in (1, 2, 3):
        metrics = {"loss": float(step), "reward": 10.0 * step, "kl": float("nan")}
        listener(StepEnded(step, metrics, metrics if step > 1 else None))
    listener(RunEnded(3))
    first, last, end = seen
    assert first == {"epoch": 1.0, "loss": 2.0, "reward": 20.0, "kl": pytest.approx(np.nan, nan_ok=True)}
    assert end == "end"
    assert (last["train_loss"], last["reward"], "loss" in last) == (2.0, 30.0, False)
    assert last["train_samples_per_second"] == pytest.approx(8 * last["train_steps_per_second"], rel=0.01)
    state.save_to_json(tmp_path / "trainer_state.json")
    saved = json.loads((tmp_path / "trainer_state.json").read_text())
    assert [line["step"] for line in saved["log_history"]] == [2, 3]
    assert (saved["log_history"][1]["kl"], saved["logging_steps"]) == (None, 2)


def test_metrics_and_the_state_are_printed_and_saved_as_by_transformers(tmp_path, capsys):
    reports = BaseTrainer()
    reports.args, reports._output_dir, reports.state = None, tmp_path / "run", State(global_step=3)
    reports.log_metrics("train", {"train_runtime": 3723.456, "train_loss": 0.123456})
    assert capsys.readouterr().out.splitlines() == [
        "***** train metrics *****",
        "  train_loss = 0.1235",
        "  train_runtime = 3723.456",
    ]
    reports.save_metrics("train", {"train_loss": 0.5})
    reports.save_metrics("eval", {"eval_loss": float("nan")})
    reports.save_metrics("test", {"test_loss": 1.0}, combined=False)
    reports.save_state()
    read = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "run").glob("*.json")}
    assert (read["train_results"], read["test_results"]) == ({"train_loss": 0.5}, {"test_loss": 1.0})
    assert read["all_results"] == {"train_loss": 0.5, "eval_loss": None}
    assert read["trainer_state"]["global_step"] == 3


@pytest.mark.heavy
def test_an_evaluation_has_trls_metrics_and_leaves_training_as_it_is(folder, tmp_path):
    evaluated = []

    class Watch:
        def on_evaluate(self, args, state, control, metrics, **more):
            evaluated.append((state.global_step, set(metrics)))

    settings = {"beta": 0.1, "entropy_coef": 0.01, "num_generations_eval": 4}
    trainer = a_trainer(folder, tmp_path, eval_dataset=PROMPTS[:3], callbacks=[Watch()], **settings)
    other = {"few": PROMPTS[:2], "more": PROMPTS[:4]}
    before = trainer.evaluate(other)
    assert before["eval_few_kl"] == pytest.approx(0, abs=1e-6)
    assert before["eval_more_reward_std"] > 0
    own = trainer.evaluate(metric_key_prefix="test")
    assert own["test_loss"] == pytest.approx(own["test_policy_loss"] - 0.01 * own["test_entropy"], abs=1e-6)
    trainer.train()
    assert trainer.evaluate()["eval_kl"] > 0
    assert [step for step, _ in evaluated] == [0, 0, 0, 3]
    assert {"eval_few_loss", "eval_few_reward"} <= evaluated[0][1]
    undisturbed = a_trainer(folder, tmp_path, eval_dataset=PROMPTS[:3], **settings)
    undisturbed.train()
    losses = [[line["loss"] for line in each.state.log_history if "loss" in line] for each in (trainer, undisturbed)]
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match="there is no evaluation set 'hard'"):
        trainer.evaluate("hard")


@pytest.mark.heavy
def test_what_scripts_read_of_a_trainer(folder, tmp_path):
    adaptive = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_coef_delta": 0.005, "entropy_target": 99.0}
    trainer = a_trainer(folder, tmp_path, beta=0.1, **adaptive)
    trainer.train()
    assert trainer.entropy_coef == pytest.approx(0.01 + 3 * 0.005)
    assert trainer.beta == 0.1
    with pytest.raises(AttributeError, match="no attribute 'bet'; did you mean beta"):
        _ = trainer.bet


@pytest.mark.heavy
def test_settings_of_the_start_and_the_end_of_train_take_part(folder, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(BaseTrainer, "evaluate", lambda self: done.append("evaluated"))

    def push(_, repo_id, private):
        done.append((repo_id, private))
        return ""

    monkeypatch.setattr("groupax.compat.trl.base.push_folder", push)
    settings = {"eval_on_start": True, "push_to_hub": True, "hub_model_id": "me/model", "hub_private_repo": True}
    settings |= {"max_steps": 1}
    trainer = a_trainer(folder, tmp_path, eval_dataset=PROMPTS[:2], **settings)
    trainer.train()
    assert done == ["evaluated", ("me/model", True)]
    trainer.args.resume_from_checkpoint = "there/checkpoint-5"
    assert trainer._resume(None)
    assert trainer.native.args.resume == "there/checkpoint-5"
