"""What a run says of itself before its first step."""

import json

import pytest

from groupax.cli.main import main
from groupax.view.overview import overview
from groupax.view.runs import Run
from tests.training.test_trainer import a_trainer, count_a


def test_a_run_records_its_data_and_number_of_steps(tmp_path):
    trainer = a_trainer(tmp_path, count_a, max_steps=1)
    assert repr(trainer).startswith("<GRPOTrainer: ")
    assert repr(trainer).endswith(f", step 0 of 1, {tmp_path / 'run'}>")
    trainer.train()
    process = json.loads((tmp_path / "run" / "run.json").read_text())["processes"][-1]
    assert process["num_steps"] == 1
    assert process["run"]["data"] == trainer.dataset_name
    assert overview(Run(tmp_path / "run"))["facts"]["data"] == trainer.dataset_name
    assert "from Python" in trainer.dataset_name
    assert "time per step" not in process["run"]
    assert trainer.describe().expectations == {"time per step": "shown after the first steps"}


@pytest.mark.heavy
def test_a_complete_run_is_reported_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    run = str(tmp_path / "run")
    command = ["train", "--recipe", "arithmetic", "--max_steps", "1", "--prompts_per_step", "2", "--output_dir", run]
    command += ["--max_completion_length", "4", "--num_generations", "2", "--eval_max_completion_length", "4"]
    assert main([*command, "--progress_bar", "none"]) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())["processes"][-1]
    assert record["run"]["data"] == "recipe arithmetic"
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| `recipe` | `arithmetic` |" in card
    assert "## Citation" in card
    assert 'prompt = "..."' not in card
    capsys.readouterr()
    monkeypatch.setattr("groupax.trainer.GRPOTrainer.__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    for more in ([], ["--max_steps", "1"], ["--logging_steps", "2"]):
        assert main(["resume", run, "--progress_bar", "rich", *more]) == 0
        assert "is complete, with 1 steps; to train on" in capsys.readouterr().out
    (tmp_path / "run" / "result.json").unlink()  # the evaluation after training is left to do
    with pytest.raises(pytest.fail.Exception, match="the model was loaded"):
        main(["resume", run])
