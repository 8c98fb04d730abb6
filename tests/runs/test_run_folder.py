"""The run folder while several want it, when it disappears, and what starts that came to nothing leave in it."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from groupax.cli.main import exit_status, main
from groupax.core.errors import PREEMPTED, PreemptedError, RewardError, RunError
from groupax.parallel.preemption import stoppable
from groupax.runs.files import LOCK, LockedError, RunLock
from groupax.runs.folder import RunFolder
from tests.training.test_trainer import a_trainer, count_a, lines_of

from .stopped_run import content_of, final_state
from .test_checkpoints import trained

HOLDER = """
import os, sys, time
from pathlib import Path
from groupax.runs.files import RunLock
lock = RunLock(Path(sys.argv[1]))
if "fork" in sys.argv:
    begun, begins = os.pipe()
    if os.fork() == 0:
        os.write(begins, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(begun, 1)
print("held", flush=True)
time.sleep(60)
"""


def a_holder(folder, *options):
    """Another process that has locked the folder."""
    command = [sys.executable, "-c", HOLDER, str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.heavy
def test_a_second_run_in_a_folder_is_refused_and_changes_nothing(tmp_path):
    run = tmp_path / "run"
    trainer = a_trainer(tmp_path, max_steps=1)  # before the other one begins
    holder = a_holder(run)
    before = content_of(tmp_path)
    said = rf"another run uses .*run \(process {holder.pid} on \S+ since \d{{4}}-.*\); wait for it, stop it"
    for start in (lambda: a_trainer(tmp_path), lambda: a_trainer(tmp_path, seed=1, resume="never"), trainer.train):
        with pytest.raises(LockedError, match=said):
            start()
    assert content_of(tmp_path) == before
    holder.kill()
    holder.communicate()
    assert (run / LOCK).exists()  # which stops nobody
    assert trainer.train().num_steps == 1
    assert os.listdir(tmp_path) == ["run"]
    assert not (run / LOCK).exists()


def test_a_lock_ends_with_its_process_even_if_that_has_forked(tmp_path):
    holder = a_holder(tmp_path, "fork")
    (tmp_path / LOCK).write_text("process \x1b[2J\x07 evil")
    with pytest.raises(LockedError) as refused:
        RunLock(tmp_path)
    assert str(refused.value).isprintable()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    RunLock(tmp_path).release()
    os.killpg(holder.pid, signal.SIGKILL)
    holder.communicate()


def test_where_files_cannot_be_locked_a_run_goes_on_with_a_warning(tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(errno.EOPNOTSUPP, "no locks")

    monkeypatch.setattr(fcntl, "flock", failing)
    with pytest.warns(UserWarning, match="cannot be locked .*; nothing stops a second run"):
        RunLock(tmp_path).release()


def test_a_run_whose_folder_is_lost_stops(tmp_path):
    folder = started_folder(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunError, match="run cannot be written to: it was deleted or moved during the run"):
        folder.write_metrics({"step": 2.0})
    folder.unlock()


def test_a_run_whose_place_is_taken_ends_and_leaves_the_other_alone(tmp_path):
    first = started_folder(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    second = started_folder(tmp_path / "run")
    with pytest.raises(RunError, match="deleted or moved"):
        first.write_metrics({"step": 2.0})
    first.unlock()
    second.write_metrics({"step": 2.0})
    assert [line["step"] for line in lines_of(tmp_path)] == [1.0, 2.0]
    for each in (first, second):
        each.unlock()


def started_folder(path):
    folder = RunFolder(path)
    folder.lock()
    folder.start({})
    folder.write_metrics({"step": 1.0})
    return folder


def failing(completion_ids):
    raise RuntimeError("typo")


@pytest.mark.heavy
def test_starts_that_made_no_step_leave_one_folder_and_what_the_user_put_there(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    for seed in range(2):
        with pytest.raises(RewardError):
            trained(tmp_path, failing, seed=seed)
    trained(tmp_path, max_steps=1, seed=9)
    assert os.listdir(tmp_path) == ["run"]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 9
    a_trainer(tmp_path, max_steps=1, seed=8).train()  # a run that made steps is kept
    assert sorted(os.listdir(tmp_path)) == ["run", "run.1"]


@pytest.mark.heavy
def test_a_run_killed_before_its_first_checkpoint_makes_its_steps_again_in_its_place(tmp_path, caplog):
    whole = trained(tmp_path / "whole", max_steps=3)
    run = tmp_path / "run"
    for _ in range(2):
        again = trained(tmp_path, max_steps=3, do_last_save=False)
        shutil.rmtree(run / "model")  # as a process leaves it that was killed after its last step
    assert "was stopped before its first checkpoint; its steps are repeated" in caplog.text
    assert sorted(os.listdir(tmp_path)) == ["run", "whole"]
    assert lines_of(tmp_path) == lines_of(tmp_path / "whole")
    for name, value in final_state(whole).items():
        assert (final_state(again)[name] == value).all()
    assert len(json.loads((run / "run.json").read_text())["processes"]) == 2
    a_trainer(tmp_path, max_steps=1, temperature=0.9).train()  # another run
    assert (tmp_path / "run.1" / "metrics.jsonl").exists()


@pytest.mark.heavy
def test_stopping_before_the_first_step_says_that_nothing_was_saved(tmp_path, caplog):
    sent = []

    def stops(completion_ids):
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return count_a(completion_ids)

    with pytest.raises(PreemptedError):
        trained(tmp_path, stops)
    assert caplog.text.count("nothing was saved. To start over, run it as before") == 1
    with pytest.raises(ValueError, match=r"has no checkpoint: nothing was saved there .*; start the run"):
        trained(tmp_path, resume=str(tmp_path / "run"))
    assert end_of(tmp_path / "run").startswith("stopped (SIGTERM")
    trainer = a_trainer(tmp_path, count_a, max_steps=1)
    trainer.learner.update = lambda *_: {}["update"]
    with pytest.raises(KeyError):
        trainer.train()
    first, *traceback = end_of(tmp_path / "run").splitlines()
    assert (first, traceback[-1]) == (
        "failed before its first step was complete: KeyError: 'update'",
        "KeyError: 'update'",
    )
    trained(tmp_path, max_steps=1)
    assert end_of(tmp_path / "run") == "done after step 1"
    assert os.listdir(tmp_path) == ["run"]


def end_of(run):
    return json.loads((run / "run.json").read_text())["processes"][-1].get("end")


def test_stopping_while_a_run_is_prepared_is_told_in_one_line(capsys):
    def command():
        with stoppable():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    assert exit_status("groupax train", command) == PREEMPTED
    said = capsys.readouterr().err
    assert said.startswith("stopped (SIGTERM) before training started; nothing was saved. Start it")
    assert said.count("\n") == 1


def test_flags_with_other_libraries_names_say_what_to_write(tmp_path, capsys):
    for name in ("config.json", "command.json"):
        (tmp_path / name).write_text("{}")
    for flags, message in (
        (["--per_device_train_batch_size", "4"], "that is TRL's or transformers' name: here it is prompts_per_step"),
        (["--bf16"], "here it is dtype='bfloat16'"),
        (["--temperature", "nan"], "temperature must be between 1e-06 and 1000, got nan"),
    ):
        for command in (["train"], ["resume", str(tmp_path)]):
            assert main([*command, *flags]) == 2
            said = capsys.readouterr().err
            assert message in said
            assert said.count("\n") == 1
