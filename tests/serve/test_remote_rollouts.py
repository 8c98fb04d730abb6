"""Training with servers in other processes: the run that it would be without them, whatever becomes of the servers."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import jax
import numpy as np
import pytest

from groupax import GRPOConfig, init_model, save_model
from groupax.core.errors import RunError
from groupax.runs.build import sampler_for
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.engine.test_engine import engine_for
from tests.episodes import episodes_run
from tests.training.test_trainer import a_trainer, lines_of

from .test_server import KEY

pytestmark = pytest.mark.heavy


def saved_model(folder):
    save_model(init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1}, seed=0), folder, a_tokenizer())
    return folder


@contextmanager
def serving(folder, *options, port=0):
    """The address of `groupax serve`, and its process."""
    command = [sys.executable, "-m", "groupax", "serve", "--model", str(folder), "--port", str(port), *options]
    environment = {**os.environ, "GROUPAX_API_KEY": KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            yield server.stdout.readline().split(" at ")[1].strip().removesuffix("/v1"), server
        finally:
            server.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def address(folder):
    with serving(folder) as (address, _):
        yield address


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("GROUPAX_API_KEY", KEY)


def rollouts(folder):
    import pyarrow.parquet as pq

    rows = [pq.read_table(path).to_pylist() for path in sorted((folder / "run" / "rollouts").glob("*.parquet"))]
    return [(row["completion_ids"], row["policy_version"], row["finish_reason"]) for each in rows for row in each]


def assert_same_runs(one, other, folders):
    for pair in zip(*(jax.tree.leaves(trainer.learner.policy) for trainer in (one, other)), strict=True):
        np.testing.assert_allclose(*pair, rtol=0, atol=1e-5)
    assert rollouts(folders[0]) == rollouts(folders[1])
    lines = [lines_of(folder) for folder in folders]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
    for line, other in zip(*lines, strict=True):
        assert line["rollout/logp_diff_max"] == pytest.approx(other["rollout/logp_diff_max"], abs=1e-5)


def assert_no_difference(folder, address, tmp_path, **settings):
    trainers = []
    for name, rollout in (("here", ()), ("there", address)):
        trainers.append(a_trainer(tmp_path / name, model=str(folder), rollout_servers=rollout, **settings))
        trainers[-1].train()
    assert_same_runs(*trainers, (tmp_path / "here", tmp_path / "there"))


@pytest.mark.drawn(2, "servers")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stop": ("a", "b c", "<unk>")},
        {"max_staleness": 1, "rollout_correction": "token_truncate", "num_iterations": 2},
    ],
    ids=str,
)
def test_training_with_a_server_is_training_without(tmp_path, folder, address, settings):
    assert_no_difference(folder, address, tmp_path, **settings)


@pytest.mark.drawn(2, "servers")
@pytest.mark.filterwarnings("ignore:environment 'Game' failed")
def test_episodes_with_a_server_are_those_without(tmp_path):
    """Their turns are sampled there; tools and environments run here."""
    model = episodes_run.save_start(tmp_path / "model")
    with serving(model) as (address, _):
        for name, servers in (("here", ()), ("there", address)):
            episodes_run.make_trainer(model, tmp_path / name / "run", rollout_servers=servers).train()
    assert rollouts(tmp_path / "here") == rollouts(tmp_path / "there")
    lines, lines_there = (lines_of(tmp_path / name) for name in ("here", "there"))
    for line, there in zip(lines, lines_there, strict=True):
        assert there["tools/call_frequency"] == line["tools/call_frequency"] > 0
        assert there["reward"] == line["reward"]
        assert there["rollout/logp_diff_max"] < 1e-5


@pytest.mark.long
def test_training_an_adapter_with_a_server_is_training_without(tmp_path, folder, address):
    with serving(folder) as (own, _):
        assert_no_difference(folder, own, tmp_path, lora_r=4, lora_alpha=8.0)
    a_trainer(tmp_path / "whole", model=str(folder), rollout_servers=address, max_steps=1).train()
    with pytest.raises(RunError, match=r"the base of .* was changed by uploads"):
        a_trainer(tmp_path / "other", model=str(folder), rollout_servers=address, lora_r=4, lora_alpha=8.0).train()


@pytest.mark.drawn(2, "servers")
def test_a_server_that_is_killed_and_started_again_changes_nothing(tmp_path, folder):
    here = a_trainer(tmp_path / "here", model=str(folder), max_steps=6)
    here.train()
    killed = threading.Event()
    with serving(folder) as (address, server):
        port = int(address.rpartition(":")[2])
        again = []

        def kill_and_start():
            server.kill()
            server.wait()
            killed.set()
            context = serving(folder, port=port)
            again.append(context)
            context.__enter__()

        thread = threading.Thread(target=kill_and_start)

        def reward(completion_ids):
            if os.path.exists(tmp_path / "there/run/metrics.jsonl") and not thread.ident:
                thread.start()
                killed.wait()
            return [ids.count(3) / len(ids) for ids in completion_ids]

        reward.__name__ = "count_a"
        there = a_trainer(tmp_path / "there", reward, model=str(folder), rollout_servers=(address,), max_steps=6)
        there.train()
        thread.join()
        again[0].__exit__(None, None, None)
    assert killed.is_set()
    assert_same_runs(here, there, (tmp_path / "here", tmp_path / "there"))


def test_the_longest_that_a_request_may_take_is_a_setting(tiny_model, tmp_path):
    args = GRPOConfig(rollout_servers="http://one:8000", rollout_timeout_s=7200.0)
    sampler = sampler_for(args, tiny_model, engine_for(tiny_model, 1), tiny_model.params, tmp_path)
    assert [server.connection().timeout for server in sampler.servers] == [7200.0]
