"""Training with servers in other processes: the run that it would be without them, whatever becomes of the servers."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from groupax import GRPOConfig, SamplingParams, init_model, save_model
from groupax.errors import RunError
from groupax.runs.build import sampler_for
from groupax.serve.client import RemoteSampler
from groupax.serve.dialects import WeightsFolder
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.engine.test_engine import engine_for
from tests.episodes import episodes_run
from tests.launch.slurm_stand_ins import run_job
from tests.package.test_docs import DOCS
from tests.training.test_trainer import a_trainer, lines_of

from .test_server import KEY, listening

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


REWARD = "def count_a(completion_ids):\n    return [ids.count(3) / len(ids) for ids in completion_ids]\n"


@pytest.mark.long
def test_the_sbatch_file_of_the_docs_trains_with_a_server_beside_it(tmp_path):
    [script] = re.findall(r"```bash\n(#!.*?)```", (DOCS / "serving.md").read_text(), re.DOTALL)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = str(free.getsockname()[1])
    model = init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1}, seed=0)
    folder = save_model(model, tmp_path / "model", a_tokenizer(eos_token="<eos>"))
    prompts = "".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "bcd", "ca", "ef"))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    (tmp_path / "length.py").write_text(REWARD)
    task = f"--dataset {tmp_path}/prompts.jsonl --reward_funcs length:count_a --output_dir {tmp_path}/run --max_steps 2"
    task += " --prompts_per_step 2 --num_generations 4 --max_completion_length 12 --progress_bar none"
    for written, meant in (("Qwen/Qwen3-0.6B", str(folder)), ("8000", port), ("--recipe gsm8k", task)):
        assert written in script
        script = script.replace(written, meant)
    status, out = run_job(tmp_path, script)
    assert status == 0, out
    assert f"at http://0.0.0.0:{port}/v1" in out
    assert "step on 127.0.0.2 ended with 0" in out  # the server, with the training
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]
    assert max(line["rollout/logp_diff_max"] for line in lines_of(tmp_path)) <= 1e-5


@contextmanager
def slow_server(status, seconds):
    """The address of one like vLLM's whose completions come late, and with this status."""

    async def models(_):
        return JSONResponse({"data": [{"id": "tiny", "owned_by": "vllm"}]})

    async def takes(_):
        return JSONResponse({})

    async def completions(_):
        await asyncio.sleep(seconds)
        return JSONResponse({"error": {"message": "the request took too long", "code": "timeout"}}, status)

    routes = [Route(path, takes, methods=["POST"]) for path in ("/collective_rpc", "/reset_prefix_cache")]
    routes += [Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])]
    with listening(Starlette(routes=routes)) as address:
        yield address


@pytest.mark.drawn(2, "servers")
@pytest.mark.parametrize(("status", "seconds", "says"), [(504, 0.0, "504: the request"), (200, 1.0, "timed out")])
def test_requests_that_take_too_long_name_the_limits(tiny_model, tmp_path, status, seconds, says):
    shared = WeightsFolder(tmp_path, tiny_model, jnp.float32)
    with slow_server(status, seconds) as address:
        sampler = RemoteSampler(
            [address], tiny_model.config, tiny_model.params, (1,), shared=shared, timeout_s=0.3, patience_s=0.0
        )
        group = sampler.sequences([np.array([4, 5])], SamplingParams(n=2, max_tokens=9))
        expected = f"{says}.*; the 2 completions of a prompt, of up to 9 tokens, took too long: raise rollout_timeout_s"
        with pytest.raises(RunError, match=expected + r", now 0.3 s, and .* \(--request_timeout_s"):
            list(sampler.stream(group))


def test_the_longest_that_a_request_may_take_is_a_setting(tiny_model, tmp_path):
    args = GRPOConfig(rollout_servers="http://one:8000", rollout_timeout_s=7200.0)
    sampler = sampler_for(args, tiny_model, engine_for(tiny_model, 1), tiny_model.params, tmp_path)
    assert [server.connection().timeout for server in sampler.servers] == [7200.0]
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="rollout_timeout_s must be between 1 and"):
            GRPOConfig(rollout_timeout_s=bad)


def test_addresses_that_are_none_are_refused():
    with pytest.raises(ValueError, match="rollout_servers must be addresses like http://host:port, got 'host:8000'"):
        GRPOConfig(rollout_servers="host:8000")
