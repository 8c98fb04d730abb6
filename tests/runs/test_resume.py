"""A run that was stopped, however, goes on as if it had not been."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from groupax import init_model, save_model
from groupax.core.errors import PREEMPTED, PreemptedError
from groupax.parallel.mesh import AXES
from groupax.runs.checkpoints import writer
from groupax.runs.checkpoints.arrays import read_on_host
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.training.test_trainer import PROMPTS, a_trainer, before_updates, is_measured, lines_of

from .stopped_run import PHASES, REUSE, final_state, letters, steps_in

REPO = Path(__file__).parents[2]


def a_run(folder, rewards=letters, dataset=PROMPTS, **settings):
    settings = {**REUSE, "eval_steps": 3, "max_steps": 8, **settings}
    return a_trainer(folder, rewards, dataset, eval_dataset=PROMPTS[:4], **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an uninterrupted run ends with, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = a_run(folder)
    trainer.train()
    return final_state(trainer), folder


def assert_same(trainer, folder, whole):
    """The run ended as the uninterrupted one did, bit for bit."""
    found, (expected, whole_folder) = final_state(trainer), whole
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    assert lines_of(folder) == lines_of(whole_folder)
    assert rollouts_of(folder) == rollouts_of(whole_folder)


def rollouts_of(folder):
    import pyarrow.parquet

    files = sorted((folder / "run" / "rollouts").iterdir())
    return {file.name: pyarrow.parquet.read_table(file).to_pylist() for file in files}


def stopped_at(trainer, step, number=signal.SIGTERM):
    """The trainer's run, stopped by a signal while it makes this step's update."""
    before_updates(trainer, lambda _: os.kill(os.getpid(), number) if trainer.cursor.step + 1 == step else None)
    with pytest.raises(PreemptedError) as stopped:
        trainer.train()
    return stopped.value


@pytest.mark.heavy
@pytest.mark.parametrize("step", [2, 5])
def test_a_run_stopped_by_a_signal_goes_on_exactly(tmp_path, whole, step):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stopped = stopped_at(a_run(tmp_path), step, random.choice([signal.SIGTERM, signal.SIGINT]))
    assert stopped.code == PREEMPTED
    assert re.search(
        rf"stopped \(SIG\w+\) after step {step}; its state is in .*step_00000{step}. To conti", str(stopped)
    )
    assert steps_in(tmp_path) == [f"step_00000{step}"]  # the update was finished
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    resumed = a_run(tmp_path)
    resumed.train()
    assert_same(resumed, tmp_path, whole)


@pytest.mark.drawn(2)
@pytest.mark.heavy
@pytest.mark.parametrize("phase", ["rollout", "reward", "main thread", "evaluation", "checkpoint"])
def test_what_can_be_done_again_is_given_up(tmp_path, whole, phase, monkeypatch):
    given_up, told = [], []

    def stop_in(function, place):
        def stopping(*arguments, **options):
            if phase == place and trainer.cursor.step >= (4 if place in ("rollout", "reward", "main thread") else 3):
                if told:  # a second signal would end this very process
                    return function(*arguments, **options)
                told.append(place)
                given_up.append(place)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1 if phase == "checkpoint" else 2.0)  # it is raised after PATIENCE_S
                given_up.pop()
            return function(*arguments, **options)

        return stopping

    trainer = a_run(tmp_path, save_steps=3)
    trainer.collector.experience = stop_in(trainer.collector.experience, "rollout")
    trainer.reward_runner.finish = stop_in(trainer.reward_runner.finish, "reward")
    if phase == "main thread":
        reward = stop_in(needing_signals, phase)

        def named(**columns):
            return reward(**columns)

        named.__name__ = "letters"
        trainer = a_run(tmp_path, named, save_steps=3)
    trainer.evaluate = stop_in(trainer.evaluate, "evaluation")
    monkeypatch.setattr(writer, "seal", stop_in(writer.seal, "checkpoint"))
    with pytest.raises(PreemptedError):
        trainer.train()
    assert given_up == ([] if phase == "checkpoint" else [phase])
    monkeypatch.undo()
    resumed = a_run(tmp_path)
    resumed.train()
    assert_same(resumed, tmp_path, whole)


def needing_signals(prompts, completion_ids, log_extra, **_):
    """As `letters`, but it limits its time, which only the main thread can."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        return letters(prompts, completion_ids, log_extra)
    finally:
        signal.signal(signal.SIGALRM, before)


SIGNALS = """
import asyncio, os, signal, sys, threading, time
from groupax.parallel import preemption

def busy(*_):
    for _ in range(100_000): pass

def swallows():
    try: busy()
    except: pass

def replaces():
    try: busy()
    except BaseException: raise OSError("a worker has died") from None

def in_a_callback():
    async def main():
        asyncio.get_running_loop().call_soon(busy)
        await asyncio.sleep(0.001)
    asyncio.run(main())

place, *numbers = sys.argv[1:]
signal.signal(signal.SIGHUP, signal.SIG_IGN if place == "ignored" else signal.SIG_DFL)  # nohup ignores it
work = {"wait": threading.Event().wait, "ignored": busy}
work |= {"swallows": swallows, "replaces": replaces, "callback": in_a_callback, "looks": busy}
preemption.PATIENCE_S = 9 if place == "looks" else 0.05
def send():
    for number in map(int, numbers):
        time.sleep(0.05 if number in (0, signal.SIGHUP) else preemption.SAME_S + 0.05)
        os.kill(os.getpid(), number)
with preemption.PreemptionHandler() as stop:
    until_s = time.monotonic() + (1 if place == "ignored" else 8)
    try:
        with stop.cancellable():
            threading.Thread(target=send).start()
            while time.monotonic() < until_s:
                work[place]()
                if place == "looks": stop.check_cancellable()
        print("done")
    except preemption.RolloutCancelled:
        print("cancelled", stop.reason)
        time.sleep(0.6 if numbers[1:] else 0)
"""
HUP, INT, TERM = "1", "2", "15"


@pytest.mark.parametrize(
    ("place", "numbers", "said"),
    [
        *[(each, (TERM,), "cancelled SIGTERM") for each in ("swallows", "replaces", "callback")],
        ("wait", (INT,), "cancelled SIGINT"),
        ("looks", (HUP, HUP), "cancelled SIGHUP"),  # a shell sends it, and the system when the shell has ended
        ("ignored", (HUP,), "done"),
        ("looks", (TERM, INT), -signal.SIGINT),  # the second one ends the program at once
    ],
)
def test_no_request_to_stop_is_lost(place, numbers, said):
    ended = subprocess.run([sys.executable, "-c", SIGNALS, place, *numbers], capture_output=True, text=True)
    assert (ended.stdout.strip() if ended.returncode == 0 else ended.returncode) == said, ended.stderr


class Killed:
    """Runs `stopped_run` in processes and kills them."""

    def __init__(self, folder, settings, pause_s):
        self.folder, self.settings, self.pause_s = folder, settings, pause_s
        folder.mkdir()
        model = init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1}, seed=0)
        if not (folder.parent / "model").exists():
            save_model(model, folder.parent / "model", a_tokenizer(eos_token="<eos>"))

    def start(self):
        self.phase = self.folder / "phase"
        self.phase.write_bytes(b"\0\0")
        arguments = [str(self.folder), json.dumps(self.settings), str(self.pause_s)]
        environment = {**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(REPO / "tests" / "runs" / "stopped_run.py"), *arguments]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)

    def now(self):
        """What the process is doing."""
        main, beside = self.phase.read_bytes()
        return PHASES[beside] if beside else PHASES[main]

    def wait_for(self, phases):
        """Until it does one of these; False if it ends before."""
        while self.process.poll() is None:
            if self.now() in phases:
                return True
            time.sleep(0.001)
        return False

    def end(self, number=signal.SIGKILL):
        """Send a signal; what it was doing, and its exit status."""
        doing = self.now()
        self.process.send_signal(number)
        _, err = self.process.communicate()
        return doing, self.process.returncode, err.decode()

    def finish(self):
        _, err = self.process.communicate()
        assert self.process.returncode == 0, err.decode()
        return dict(np.load(self.folder / "final.npz"))


def metrics_of_run(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not is_measured(name)} for line in lines]


def check_killed(tmp_path, num_kills, settings, seed):
    """Kill a run that often, at random moments, resume each time; returns what it was doing."""
    undisturbed = Killed(tmp_path / "undisturbed", settings, 0.0)
    undisturbed.start()
    expected = undisturbed.finish()
    killed = Killed(tmp_path / "killed", settings, 0.05)
    moments = random.Random(seed)
    log = []
    while len(log) < num_kills:
        killed.start()
        at_random = moments.random() < 0.3
        rare = [phase for phase in PHASES[1:] if phase not in log] or PHASES[1:]
        if not killed.wait_for(PHASES[1:] if at_random else (moments.choice(rare),)):
            killed.finish()
            shutil.rmtree(killed.folder / "run")  # it was done before that; from the start again
            continue
        time.sleep(moments.uniform(0, 2.0 if at_random else 0.08))
        doing, status, err = killed.end()
        assert status == -signal.SIGKILL, err
        log.append(doing)
    killed.start()
    found = killed.finish()
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    assert metrics_of_run(killed.folder / "run") == metrics_of_run(undisturbed.folder / "run")
    assert rollouts_of(killed.folder) == rollouts_of(undisturbed.folder)
    return log


@pytest.mark.heavy
def test_killed_in_the_middle_it_goes_on_exactly(tmp_path):
    check_killed(tmp_path, 1, {"max_steps": 6}, seed=0)


@pytest.mark.long
def test_killed_at_twenty_random_moments_it_goes_on_exactly(tmp_path):
    log = check_killed(tmp_path, 20, {}, seed=1)
    print({phase: log.count(phase) for phase in log})
    assert {"rollout", "reward", "update", "checkpoint"} <= set(log)


@pytest.mark.heavy
def test_another_mesh_continues_the_same_state(tmp_path):
    """Trained on a mesh whose weights are split over fsdp and tp, continued on one device, and on other data shards."""
    begun = {}

    def run(shape, folder):
        mesh = jax.sharding.Mesh(np.array(jax.devices())[: np.prod(shape)].reshape(shape), AXES)
        settings = {"max_steps": 4, "save_steps": 2, "save_total_limit": 0, "prompts_per_step": 8, "beta": 0.05}
        trainer = a_trainer(folder, letters, model=init_model({**TINY, "vocab_size": 16}, mesh=mesh), **settings)
        started = trainer.run.hooks.started

        def keeping(run):
            for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.learner.state):
                begun[re.sub(r"[\[\]'.]+", ".", jax.tree_util.keystr(path)).strip(".")] = np.asarray(leaf)
            started(run)

        trainer.run.hooks.started = keeping
        trainer.train()
        return {str(leaf.sharding.spec) for leaf in jax.tree.leaves(trainer.learner.state)}

    specs = "".join(run((1, 2, 1, 2, 1), tmp_path))
    assert "'fsdp'" in specs
    assert "'tp'" in specs
    saved = tmp_path / "run" / "checkpoints" / "step_000002"
    arrays = {f"params.{name}": x for name, x in read_on_host(saved / "params").items()}
    arrays |= {f"opt_state.{name}": x for name, x in read_on_host(saved / "optimizer").items()}
    for name, shape in (("one", (1, 1, 1, 1, 1)), ("four", (2, 2, 1, 1, 1))):
        shutil.copytree(tmp_path / "run", tmp_path / name / "run")
        shutil.rmtree(tmp_path / name / "run" / "checkpoints" / "step_000004")
        begun.clear()
        run(shape, tmp_path / name)
        assert begun.keys() == arrays.keys()
        for key, value in arrays.items():
            np.testing.assert_array_equal(begun[key], value, err_msg=key)
        found, expected = ([line["loss"] for line in lines_of(folder)] for folder in (tmp_path / name, tmp_path))
        np.testing.assert_allclose(found, expected, atol=1e-5)
