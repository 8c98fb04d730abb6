"""Several processes with devices of their own make one run."""

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from groupax import init_model, save_model
from groupax.core.errors import RunError
from groupax.parallel.processes import Peers, _distributed_arguments, _refuse_torchrun
from groupax.satellites.launch.program import free_port
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.episodes.episodes_run import save_start
from tests.serve.test_remote_rollouts import serving
from tests.serve.test_server import KEY

VARIABLES = ("GROUPAX_COORDINATOR", "GROUPAX_NUM_PROCESSES", "GROUPAX_PROCESS_ID")
PROGRAM = (str(Path(__file__).with_name("processes_run.py")),)
EPISODES = "-m", "tests.episodes.episodes_run"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    save_model(
        init_model({**TINY, "vocab_size": 16, "num_hidden_layers": 1}), folder / "model", a_tokenizer(eos_token="<eos>")
    )
    return folder


def begun(folder, number, devices, settings, *fault, program=PROGRAM):
    """That many processes on loopback, with so many devices each."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", *program, str(folder), str(devices), json.dumps(settings)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache")}
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    processes = []
    for own in range(number):
        values = (address, str(number), str(own)) if number > 1 else ()
        with (folder / f"err{own}").open("w") as err:
            processes.append(
                subprocess.Popen(
                    [*command, *fault],
                    stdout=subprocess.DEVNULL,
                    stderr=err,
                    cwd=Path(__file__).parents[2],
                    env={**environment, **dict(zip(VARIABLES, values, strict=False))},
                )
            )
    return processes


def run(folder, number, devices, settings, *fault, program=PROGRAM):
    """The processes' exit statuses and what they said on standard error."""
    processes = begun(folder, number, devices, settings, *fault, program=program)
    try:
        statuses = [process.wait(timeout=1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return statuses, [(folder / f"err{own}").read_text() for own in range(number)]


def told(folder):
    """Rows of the rollout log, metrics and final state."""
    rows = [
        row
        for file in sorted((folder / "run" / "rollouts").glob("*.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    with np.load(folder / "final.npz") as final:
        return rows, lines, dict(final)


def assert_same_run(one, several):
    rows, lines, final = told(one)
    rows_too, lines_too, final_too = told(several)
    names = ("completion_ids", "prompt_index", "sample_index", "advantage")
    assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in rows_too]
    assert {row["extra/scored_by"] for row in rows} == {0}
    for a, b in zip(lines, lines_too, strict=True):
        for name in ("reward", "letters", "eval_reward", "grad_norm", "kl"):
            assert b.get(name, 0.0) == pytest.approx(a.get(name, 0.0), rel=1e-4, abs=1e-6)
    assert final.keys() == final_too.keys()
    for name, array in final.items():
        np.testing.assert_allclose(final_too[name], array, atol=1e-6, rtol=0, err_msg=name)
    return {row["extra/scored_by"] for row in rows_too}


# -- the variables and the connections


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GROUPAX_COORDINATOR": "a:1", "GROUPAX_PROCESS_ID": "0"}, "but not GROUPAX_NUM_PROCESSES"),
        (dict(zip(VARIABLES, ("a:1", "2", "2"), strict=True)), "one from 0 below it"),
        (dict(zip(VARIABLES, ("a", "2", "1"), strict=True)), "must be host:port, it is 'a'"),
    ],
)
def test_variables_are_checked(environment, message):
    with pytest.raises(ValueError, match=message):
        _distributed_arguments(environment)


def test_one_process_joins_nobody():
    assert _distributed_arguments({}) is None
    assert _distributed_arguments(dict(zip(VARIABLES, ("a:1", "1", "0"), strict=True))) is None
    assert _distributed_arguments({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert _distributed_arguments({"TPU_WORKER_HOSTNAMES": "a,b"}) == {}


@pytest.mark.parametrize("chosen", [{}, {"JAX_LOCAL_DEVICE_IDS": "1"}])
def test_one_process_of_a_host_has_all_its_devices(chosen):
    """Under SLURM jax takes one for each task, unless a list says otherwise."""
    every = {} if chosen else {"local_device_ids": []}
    given = dict(zip(VARIABLES, ("a:1", "2", "1"), strict=True))
    own = {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1}
    assert _distributed_arguments(given | chosen) == own | every
    assert _distributed_arguments({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "8"} | chosen) == every
    assert _distributed_arguments({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"} | chosen) == {}


JOINS = """
import sys
from groupax.parallel.runtime import configure_jax
configure_jax()
import jax
print(f"{jax.process_index()} of {jax.process_count()}: {jax.config.read('jax_cuda_visible_devices')}", file=sys.stderr)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("several_on_a_host", [False, True])
def test_a_step_of_slurm_is_joined(several_on_a_host):
    step = {
        "SLURM_JOB_ID": "54321",
        "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1" if several_on_a_host else "2",
    }
    tasks = []
    for task in "01":
        place = {"SLURM_PROCID": task, "SLURM_LOCALID": task if several_on_a_host else "0"}
        command = [sys.executable, "-W", "ignore", "-c", JOINS]
        tasks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **step, **place}))
    lines = [task.communicate()[1].strip() for task in tasks]
    assert lines == (["0 of 2: 0", "1 of 2: 1"] if several_on_a_host else ["0 of 2: all", "1 of 2: all"])


def test_copies_of_pytorchs_launchers_are_refused():
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"}
    with pytest.raises(ValueError, match="has started 4 processes of this program"):
        _refuse_torchrun(torchrun)
    _refuse_torchrun({**torchrun, "WORLD_SIZE": "1"})
    _refuse_torchrun({**torchrun, "GROUPAX_COORDINATOR": "a:1"})
    _refuse_torchrun({"WORLD_SIZE": "4"})


PEER = """
import sys
from groupax.parallel.runtime import configure_jax
configure_jax()
from groupax.parallel import processes
own = processes.process_index()
assert processes.all_gather_object({"number": own}) == [{"number": each} for each in range(3)]
big = processes.all_gather_object(bytes(own * 3_000_000))
assert [len(each) for each in big] == [0, 3_000_000, 6_000_000]
assert processes.broadcast_object(own) == 0
if sys.argv[1] == "raise":
    if own == 2:
        raise KeyError("a disk")
    processes.all_gather_object(None)
"""


def of_several(number, *program):
    """The exit statuses of that many processes, and what they said on standard error."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *program],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **dict(zip(VARIABLES, (address, str(number), str(own)), strict=True))},
        )
        for own in range(number)
    ]
    said = [process.communicate()[1] for process in started]
    return [process.returncode for process in started], said


@pytest.mark.heavy
def test_processes_exchange_objects_and_learn_what_ended_one():
    assert of_several(3, "-c", PEER, "leave") == ([0, 0, 0], ["", "", ""])
    statuses, said = of_several(3, "-c", PEER, "raise")
    assert statuses == [1, 1, 1]
    why = "process 2 failed: KeyError: 'a disk'"
    for own in (0, 1):
        assert f"groupax: {why}. Process {own} stops too" in said[own]
        assert f"RunError: {why}" in said[own]


def test_objects_of_strangers_are_refused():
    class Service(dict):
        key_value_set_bytes = dict.__setitem__
        key_value_delete = dict.pop

        def blocking_key_value_get_bytes(self, key, _):
            if key not in self:
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self[key]

    service = Service()
    peers = Peers(0, 1, service, b"secret")
    assert peers.all_gather_object("a") == ["a"]
    service.key_value_set_bytes = lambda key, value: None
    for forged in (service["groupax/1/0"], b"x" * 40):  # of another round, and of no process
        service[f"groupax/{peers._round + 1}/0"] = forged
        with pytest.raises(RunError, match="is not of a process of this run"):
            peers.all_gather_object("b")
    peers._has_left = True


@pytest.mark.heavy
def test_each_of_two_processes_makes_its_calls_and_both_learn_the_outcomes():
    found = [
        (0, 0, ""),
        (1, None, "TypeError: what it returned cannot be sent to the other processes: TypeError"),
        (2, None, "OSError: gone"),
        (3, 3, ""),
    ]
    statuses, said = of_several(2, "-m", "tests.episodes.calls_run")
    assert statuses == [0, 0]
    assert said[0] == said[1]
    assert sorted(ast.literal_eval(said[0])) == found


# -- whole runs


@pytest.fixture(scope="module")
def one_process(place):
    statuses, _ = run(place / "one", 1, 4, {})
    assert statuses == [0]
    return place / "one"


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("number", "devices", "settings"),
    [
        (2, 2, {"save_steps": 2}),
        (2, 2, {"mesh": "1,4,1,1,1"}),
        (2, 2, {"mesh": "2,1,1,2,1"}),
        (4, 1, {"mesh": "1,-1,1,1,1"}),
        (2, 2, {"decoding_tp": 2}),  # within a process
        (2, 1, {"decoding_tp": 2}),  # over two
        (2, 1, {"decoding_tp": 2, "mesh": "1,2,1,1,1"}),
    ],
    ids=str,
)
def test_several_processes_are_one_run(tmp_path, place, one_process, number, devices, settings):
    folder = place / tmp_path.name
    statuses, errors = run(folder, number, devices, settings)
    assert statuses == [0] * number, errors
    assert len(assert_same_run(one_process, folder)) == number
    assert {path.name for path in (folder / "run").glob("*.jsonl")} == {
        f"{name}.jsonl" for name in ("diagnostics", "metrics", "record")
    }


@pytest.mark.drawn(4, "episodes")
@pytest.mark.heavy
def test_two_processes_play_the_episodes_of_one(tmp_path):
    """Each with the tools and environments of its share, and both with all that came of them."""
    save_start(tmp_path / "model")
    for name, number in (("one", 1), ("two", 2)):
        statuses, errors = run(
            tmp_path / name, number, 2 // number, {"max_steps": 1, "eval_steps": 1}, program=EPISODES
        )
        assert statuses == [0] * number, errors
    (rows, lines, final), (rows_too, lines_too, final_too) = (told(tmp_path / name) for name in ("one", "two"))
    names = ("completion_ids", "mask", "messages", "finish_reason", "rewards/calls", "rewards/Game")
    assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in rows_too]
    assert {"done", "env_error"} < {row["finish_reason"] for row in rows}
    assert {row["extra/scored_by"] for row in rows_too} == {0, 1}
    for row, row_too in zip(rows, rows_too, strict=True):
        timeless = [[untimed(turn) for turn in json.loads(each["turns"])] for each in (row, row_too)]
        assert timeless[0] == timeless[1]
    for a, b in zip(lines, lines_too, strict=True):
        for name in ("reward", "grad_norm", "tools/call_frequency", "stop/env_error", "eval_stop/done"):
            assert b.get(name, 0.0) == pytest.approx(a.get(name, 0.0), rel=1e-4, abs=1e-6)
    assert {"stop/env_error", "eval_tools/failure_frequency"} < set().union(*lines_too)
    for name, array in final.items():
        np.testing.assert_allclose(final_too[name], array, atol=1e-6, rtol=0, err_msg=name)


def untimed(turn):
    return {**turn, "calls": [{**call, "seconds": 0.0} for call in turn["calls"]]}


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_stops_the_other_and_all_go_on(place, one_process, killed):
    folder = place / f"killed{killed}"
    processes = begun(folder, 2, 2, {"save_steps": 1}, "SIGKILL", str(killed))
    assert processes[killed].wait(timeout=1200) == -signal.SIGKILL
    assert processes[1 - killed].wait(timeout=600) != 0
    text = (folder / f"err{1 - killed}").read_text()
    assert "JAX distributed service detected fatal errors" in text or f"process {1 - killed} failed" in text
    statuses, errors = run(folder, 2, 2, {"save_steps": 1})
    assert statuses == [0, 0], errors
    assert_same_run(one_process, folder)


@pytest.mark.long
def test_a_signal_to_one_stops_all_and_all_go_on(place, one_process):
    folder = place / "stopped"
    statuses, errors = run(folder, 2, 2, {}, "SIGTERM")
    assert statuses == [75, 75], errors
    statuses, errors = run(folder, 2, 2, {})
    assert statuses == [0, 0], errors
    assert_same_run(one_process, folder)


@pytest.mark.heavy
def test_rollouts_made_ahead_are_refused(place):
    statuses, errors = run(place / "ahead", 2, 1, {"max_staleness": 1, "rollout_correction": "token_truncate"})
    assert all(statuses)
    assert "several processes do not support, and there are 2" in errors[0]


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"lora_r": 2, "mesh": "1,4,1,1,1"}])
def test_several_processes_that_sample_on_a_server_are_one_run(place, monkeypatch, settings):
    monkeypatch.setenv("GROUPAX_API_KEY", KEY)
    name = "adapter" if settings else "whole"
    with serving(place / "model") as (address, _):
        folders = place / f"served_{name}", place / f"served_{name}_by_two"
        for folder, number in zip(folders, (1, 2), strict=True):
            statuses, errors = run(folder, number, 4 // number, {"rollout_servers": address, **settings})
            assert statuses == [0] * number, errors
    assert assert_same_run(*folders) == {0, 1}
