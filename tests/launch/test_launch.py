"""Launchers: processes on this machine with stand-ins for training, and the job file of SLURM."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from groupax.cli.launch import launch
from groupax.cli.main import COMMANDS, main
from groupax.core.errors import PREEMPTED
from groupax.core.settings import environment as env
from groupax.satellites.launch.local import (
    MISTAKE,
    Outcome,
    Retries,
    Stop,
    copy_lines,
    local_attempt,
    run_with_retries,
)
from groupax.satellites.launch.program import LAUNCHED, process_environment, program_of
from groupax.satellites.launch.slurm import Slurm, script_of, silent_servers, submit, write_script

from .slurm_stand_ins import run_job

TRAIN = ["train", "--model", "Qwen/Qwen2.5-72B", "--dataset", "it's $HOME.jsonl"]


def local(number, code, *options):
    """The status of `groupax launch local` with a program of Python."""
    return launch(["local", "-n", str(number), "--backoff_s", "0", *options, "--", sys.executable, "-Sc", code])


# -- what is started


def test_words_are_a_command_or_a_program():
    assert program_of(["train", "--x"]) == [sys.executable, "-m", "groupax", "train", "--x"]
    assert program_of(["true", "a b"]) == ["true", "a b"]
    assert set(LAUNCHED) <= set(COMMANDS)
    assert process_environment(1, 4, "h:1") == {
        "GROUPAX_COORDINATOR": "h:1",
        "GROUPAX_NUM_PROCESSES": "4",
        "GROUPAX_PROCESS_ID": "1",
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lokal", "--", "train"], "did you mean local"),
        (["local", "-n", "2", "train"], "must follow --"),
        (["local", "-n", "2", "--", "trian"], "did you mean train"),
        (["local", "-n", "1", "--restarts", "-1", "--", "true"], "0 or more, got -1"),
        (["slurm", "--nodes", "1", "--server_nodes", "1", "--", *TRAIN], "at least one node has to train"),
        (["slurm", "--time", "00:05:00", "--", *TRAIN], "--time 00:05:00 leaves no time to train"),
        (["slurm", "--nodes", "2", "--server_nodes", "1", "--", "eval", *TRAIN[1:]], "samples without servers"),
        (["slurm", "--partition", "a\n#SBATCH --x", "--", *TRAIN], "must be one line"),
        (["slurm", "--nodes", "2", "--server_nodes", "1", "--", "train", "--recipe", "gsm8k"], "no model to load"),
        (
            ["slurm", "--nodes", "2", "--server_nodes", "1", "--server_options=--port 1", "--", *TRAIN],
            "--port of the servers",
        ),
        (["slurm", "--file", "/nowhere/a.sbatch", "--dry_run", "--skip_check", "--", *TRAIN], "cannot be written"),
        (["slurm", "--file", __file__, "--dry_run", "--skip_check", "--", *TRAIN], "replace it with --force"),
        (["slurm", "--dry_run", "--", *TRAIN, "--reward_funcs", "nowhere:f"], "there is no file it's $HOME.jsonl"),
    ],
)
def test_mistakes_are_told(argv, message, capsys):
    assert main(["launch", *argv]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


# -- when it is started again


def test_restarts_follow_the_budget_and_the_pauses_double():
    endings = iter(["failed", "preempted", "failed", "preempted", "done"])
    pauses, told = [], []

    def pause(seconds):
        pauses.append(seconds)
        return True

    retries = Retries(restarts=2, preemptions=2, backoff_s=16.0)
    outcome = run_with_retries(lambda: Outcome(next(endings), "why", 7), retries, told.append, pause)
    assert (outcome.ending, outcome.status, pauses) == ("done", 7, [16.0, 32.0, 60.0, 60.0])
    assert told[0] == "why; restarting in 16 s (1 of at most 2 times)"


@pytest.mark.parametrize(("ending", "attempts"), [("mistake", 1), ("stopped", 1), ("failed", 3), ("preempted", 2)])
def test_what_is_not_started_again(ending, attempts):
    made = []
    retries = Retries(restarts=2, preemptions=1)
    outcome = run_with_retries(
        lambda: made.append(1) or Outcome(ending, "why", 1), retries, lambda _: None, lambda _: True
    )
    assert (outcome.ending, len(made)) == (ending, attempts)
    assert run_with_retries(lambda: Outcome("failed", "", 3), retries, print, lambda _: False).ending == "stopped"


# -- on this machine


def test_lines_have_prefixes_and_bars_are_left_out(tmp_path):
    (tmp_path / "source").write_bytes(b"one\nbar 1\rbar 2\r\n\xff\nlast")
    with (tmp_path / "target").open("w", encoding="utf-8") as target:
        copy_lines((tmp_path / "source").open("rb"), target, "[0] ").join()
    assert (tmp_path / "target").read_text(encoding="utf-8") == "[0] one\n[0] bar 2\n[0] \ufffd\n[0] last\n"


def test_one_that_fails_stops_all_and_all_start_again(tmp_path, capfd):
    code = f"""
import os, sys, time
me = os.environ["GROUPAX_PROCESS_ID"]
open(rf"{tmp_path}/{{me}}", "a").write("x")
while not all(os.path.exists(rf"{tmp_path}/{{each}}") for each in "01"):
    time.sleep(0.01)
if me == "0":
    sys.exit(3)
time.sleep(60)
"""
    assert local(2, code, "--restarts", "1") == 3
    assert (tmp_path / "0").read_text() == "xx"
    err = capfd.readouterr().err
    assert "process 0 of 2 failed with status 3; restarting in 0 s (1 of at most 1 times)" in err
    assert "not restarted again after 1 restarts" in err


def test_status_75_is_started_again_and_2_is_not(tmp_path, capfd):
    code = (
        f"import pathlib, sys; f = pathlib.Path(r'{tmp_path}/f'); e = f.exists(); f.touch(); sys.exit(0 if e else 75)"
    )
    assert local(1, code, "--restarts", "0") == 0
    assert "the process was preempted; restarting in" in capfd.readouterr().err
    assert local(1, code.replace("/f'", "/g'"), "--preemptions", "0") == PREEMPTED
    assert local(1, "import sys; sys.exit(2)") == MISTAKE
    assert "a mistake that a restart would repeat" in capfd.readouterr().err


def test_one_that_does_not_stop_is_killed_with_what_it_started(tmp_path):
    """The other one ignores SIGTERM, and so does its child."""
    code = f"""
import os, signal, sys, time
if os.environ["GROUPAX_PROCESS_ID"] == "0":
    while not os.path.exists(r"{tmp_path}/child"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    open(r"{tmp_path}/part", "w").write(str(child))
    os.replace(r"{tmp_path}/part", r"{tmp_path}/child")
time.sleep(600)
"""
    outcome = local_attempt([sys.executable, "-Sc", code], 2, Stop(), grace_s=0.1)
    assert (outcome.ending, outcome.status) == ("failed", 128 + signal.SIGKILL)
    assert "process 0 of 2 was killed by SIGKILL, as the system does when memory is full" in outcome.why
    assert _is_gone(int((tmp_path / "child").read_text()))


def _is_gone(pid):
    for _ in range(500):
        status = Path(f"/proc/{pid}/stat")
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


SAVES = """
import os, signal, sys, time
def stop(*_):
    time.sleep(0.2)
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("ready", os.getpid(), flush=True)
time.sleep(600)
"""


def test_signals_are_passed_on_and_a_saved_state_is_told():
    command = [sys.executable, "-m", "groupax", "launch", "local", "-n", "2", "--", sys.executable, "-Sc", SAVES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert {launcher.stdout.readline()[:9] for _ in range(2)} == {"[0] ready", "[1] ready"}
        launcher.send_signal(signal.SIGTERM)
        out, err = launcher.communicate()
    assert launcher.returncode == PREEMPTED
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert "stopped by SIGTERM; the state is saved" in err


def test_a_launcher_that_is_killed_takes_its_processes_along():
    command = [sys.executable, "-m", "groupax", "launch", "local", "-n", "1", "--", sys.executable, "-Sc", SAVES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        pid = int(launcher.stdout.readline().split()[-1])
        launcher.kill()
        launcher.communicate()
    assert _is_gone(pid)


def test_preemption_of_one_gives_the_others_time_to_save(capfd):
    """They have agreed on it; a second signal would end them at once."""
    code = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
if os.environ["GROUPAX_PROCESS_ID"] == "1":
    time.sleep(0.5)
    print("saved")
sys.exit(75)
"""
    assert local(2, code, "--preemptions", "0") == PREEMPTED
    assert "[1] saved" in capfd.readouterr().out


# -- SLURM

JOBS = {
    "one node": (Slurm(), TRAIN),
    "trainers": (Slurm(nodes=4, time="2-00:00:00", gres="gpu:8", account="me", partition="p"), TRAIN),
    "two parts": (
        Slurm(
            nodes=5,
            server_nodes=2,
            cpus=8,
            server_options="--dtype bfloat16 --name 'a b'",
            setup=("module() { :; }", "module load cuda"),
            sbatch=("constraint=a100|h100", "mail-type=END"),
            server_wait_s=60,
            restarts=5,
            requeues=7,
            backoff_s=3,
            grace_s=9,
            notice_s=120,
        ),
        TRAIN,
    ),
    "a program": (
        Slurm(nodes=2, server_nodes=1, server_options="--model m"),
        [sys.executable, "-c", "print('$x `y`')"],
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_job_files_are_sound_bash(job, tmp_path):
    file = write_script(script_of(*JOBS[job]), tmp_path / "a.sbatch")
    subprocess.run(["bash", "-n", str(file)], check=True)
    assert list(tmp_path.iterdir()) == [file]
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(file)], check=True)


def test_the_job_file_says_what_was_asked_for():
    text = script_of(*JOBS["two parts"])
    options = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    expected = "nodes=5 ntasks-per-node=1 cpus-per-task=8 signal=TERM@120 requeue open-mode=append mail-type=END"
    assert {*expected.split(), 'constraint="a100|h100"', "job-name=groupax"} <= {*options}
    assert "exclusive" not in options
    lines = script_of(*JOBS["trainers"]).splitlines()
    assert {f"#SBATCH --{option}" for option in ("exclusive", "mem=0", "gres=gpu:8", "time=2-00:00:00")} <= {*lines}
    for line in ("NUM_TRAINERS=3", "NUM_SERVERS=2", "RESTARTS=5", "REQUEUES=7", "BACKOFF_S=3", "GRACE_S=9"):
        assert line in text.splitlines()
    assert "serve --model Qwen/Qwen2.5-72B --dtype bfloat16 --name 'a b' --host 0.0.0.0" in text
    assert text.index("module load cuda") < text.index("set -uo")
    assert "--rollout_servers" not in script_of(*JOBS["a program"])


def test_the_file_is_written_and_sbatch_called(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which the launcher sets for its dry run
    own = ["slurm", "--dry_run", "--job_name", "one"]
    assert launch([*own, "--", "train", "--recipe", "arithmetic", "--mesh", "1,4,1,1,1"]) == 0
    assert "dry run: nothing is trained" in (out := capsys.readouterr().out)
    assert "wrote one.sbatch" in out
    assert launch([*own, "--skip_check", "--force", "--", *TRAIN]) == 0
    assert "Qwen2.5-72B" in Path("one.sbatch").read_text()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"sbatch is not installed here; one\.sbatch is written"):
        submit(Path("one.sbatch"))
    for status, said in ((0, "Submitted batch job 7"), (1, "")):
        fake = tmp_path / "sbatch"
        fake.write_text(f"#!/bin/sh\necho '{said}'; echo 'invalid partition' >&2; exit {status}\n")
        fake.chmod(0o755)
        if status:
            with pytest.raises(ValueError, match=r"sbatch refused one\.sbatch: invalid partition"):
                submit(Path("one.sbatch"))
        else:
            assert submit(Path("one.sbatch")) == said


TRAINER = """
import os, pathlib, sys
place = [os.environ["GROUPAX_" + name] for name in ("PROCESS_ID", "NUM_PROCESSES", "COORDINATOR")]
sys.stdout.write(" ".join([*place, str(sys.argv[1:])]) + os.linesep)
seen = pathlib.Path("seen" + os.environ["GROUPAX_PROCESS_ID"])
statuses = [int(word) for word in os.environ["STATUSES"].split()]
number = len(seen.read_text()) if seen.exists() else 0
seen.write_text("x" * (number + 1))
sys.exit(statuses[number])
"""


def test_a_job_is_started_again_after_failures_and_ends_with_the_last_status(tmp_path):
    words = [sys.executable, "-Sc", TRAINER, "it's $HOME", ""]
    status, out = run_job(tmp_path, script_of(Slurm(nodes=2, backoff_s=0), words), STATUSES="3 0")
    assert status == 0, out
    assert out.count("srun on 127.0.0.1,127.0.0.2") == 2
    assert "0 2 127.0.0.1:14690 [\"it's $HOME\", '']" in out
    assert "ended with status 3; restarting in 0 s (1 of 3 times)" in out
    for name in ("seen0", "seen1"):
        (tmp_path / name).unlink()
    status, out = run_job(tmp_path, script_of(Slurm(backoff_s=0, restarts=1), words), STATUSES="3 4")
    assert status == 4
    assert "not restarted again after 1 restarts" in out


@pytest.mark.parametrize(("status", "requeued"), [(PREEMPTED, True), (MISTAKE, False)])
def test_a_saved_state_goes_back_into_the_queue_and_a_mistake_does_not(tmp_path, status, requeued):
    words = [sys.executable, "-Sc", TRAINER]
    ended, out = run_job(tmp_path, script_of(Slurm(), words), STATUSES=str(status))
    assert ("requeued 12345" in out) == requeued
    assert ended == (-signal.SIGTERM if requeued else status)


def test_trainers_start_when_the_servers_answer(tmp_path):
    """A server of our own listens where the job has told its servers to, as the stand-in of one only waits."""
    import http.server

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.2", 0), Health) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            port = server.server_address[1]
            assert silent_servers([f"http://127.0.0.2:{port}"], 60.0) == []
            text = script_of(Slurm(nodes=2, server_nodes=1), ["train", "--model", "m"])
            shown = f"import os, sys; print('trains', sys.argv[1:], len(os.environ['{env.API_KEY}']))"
            trainer = f"TRAINER=({sys.executable} -Sc {shlex.quote(shown)} train)"
            text = re.sub(r"^TRAINER=.*$", lambda _: trainer, text, flags=re.MULTILINE)
            text = re.sub(
                r"^SERVER=.*$", "SERVER=(bash -c 'echo serves; exec sleep 60' server)", text, flags=re.MULTILINE
            )
            text = re.sub(r"^port=.*$", f"port={port - 1}", text, flags=re.MULTILINE)
            status, out = run_job(tmp_path, text)
        finally:
            server.shutdown()
    assert status == 0
    assert f"trains ['train', '--rollout_servers', 'http://127.0.0.2:{port}'] 64" in out
    assert out.index("srun on 127.0.0.2") < out.index("srun on 127.0.0.1")


def test_servers_that_do_not_answer_are_named():
    assert silent_servers(["http://127.0.0.1:9"], 0.0) == ["http://127.0.0.1:9"]
