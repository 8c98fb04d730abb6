"""What a run says and records of itself, and the commit of a user's program, without the hooks of its repository."""

import json
import os
import shutil
import subprocess

import pytest

from groupax.cli.main import main
from groupax.runs.header import commit_of
from groupax.satellites.view.overview import overview
from groupax.satellites.view.runs import Run
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
    assert 'prompt = "..."' not in card
    capsys.readouterr()
    monkeypatch.setattr("groupax.trainer.GRPOTrainer.__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    for more in ([], ["--max_steps", "1"], ["--logging_steps", "2"]):
        assert main(["resume", run, "--progress_bar", "rich", *more]) == 0
        assert "is complete, with 1 steps; to train on" in capsys.readouterr().out
    (tmp_path / "run" / "result.json").unlink()  # the evaluation after training is left to do
    with pytest.raises(pytest.fail.Exception, match="the model was loaded"):
        main(["resume", run])


def git(folder, *arguments):
    settings = ("user.name=x", "user.email=x", "commit.gpgsign=false", "core.hooksPath=/dev/null")
    command = ["git", *(each for setting in settings for each in ("-c", setting)), *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "work"
    (folder / "inside").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)")
    (folder / "inside" / "more.py").write_text("print(2)")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_a_clean_tree_has_its_commit_and_a_changed_one_says_so(repository, tmp_path, monkeypatch):
    commit = git(repository, "rev-parse", "HEAD")
    assert commit_of(repository) == commit_of(repository / "inside") == commit
    (repository / "untracked.py").write_text("")
    os.utime(repository / "train.py", (1, 1))  # another time, the same content
    assert commit_of(repository / "inside") == commit
    (repository / "train.py").write_text("print(3)")
    assert commit_of(repository / "inside") == f"{commit}-dirty"
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q", "empty")
    assert commit_of(tmp_path / "empty") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(repository) is None


def test_hooks_and_monitors_of_a_repository_are_not_run(repository):
    ran = repository.parent / "ran"
    program = repository.parent / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    program.chmod(0o755)
    for name in ("core.fsmonitor", "core.pager", "diff.evil.command"):
        git(repository, "config", name, str(program))
    (repository / ".git" / "info" / "attributes").write_text("* diff=evil\n")
    for hook in ("post-index-change", "pre-commit", "fsmonitor-watchman"):
        shutil.copy(program, repository / ".git" / "hooks" / hook)
    os.utime(repository / "train.py", (1, 1))
    assert commit_of(repository) is not None
    (repository / "train.py").write_text("print(4)")
    assert str(commit_of(repository)).endswith("-dirty")
    assert not ran.exists()
