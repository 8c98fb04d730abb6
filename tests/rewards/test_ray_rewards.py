"""Reward functions as tasks of a Ray cluster on this machine: as in processes, and with functions that only we know."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from groupax.core.settings.rollouts import RewardSettings
from groupax.rewards.resolve import resolve_rewards
from groupax.rewards.runner import RewardRunner

from .test_rewards import rollouts_of

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def nodes():
    """A cluster of a node without cores, and one that has two and a GPU that is only said to be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray = pytest.importorskip("ray")
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes.worker = nodes.add_node(num_cpus=2, num_gpus=1)
        patch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


def a_runner(*functions, **settings):
    settings = {"reward_workers": 2, **settings}
    return RewardRunner(resolve_rewards(list(functions), []), RewardSettings(reward_workers_on="ray", **settings))


def scored(runner, *texts):
    for text in texts:
        runner.start(rollouts_of(text))
    return runner.finish()


def test_a_missing_ray_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"needs further packages: pip install 'groupax\[ray\]'"):
        a_runner(lambda completions: [])


@pytest.mark.long
def test_functions_of_this_process_run_on_the_cluster_as_in_processes(nodes):
    here, handler = os.getpid(), signal.getsignal(signal.SIGTERM)

    def places(completions, trainer_state, log_extra, log_metric):
        import ray

        context = ray.get_runtime_context()
        devices = [*context.get_accelerator_ids()["GPU"], os.environ["CUDA_VISIBLE_DEVICES"]]
        assert not any(devices), devices
        assert os.environ["JAX_PLATFORMS"] == "cpu"
        assert context.get_assigned_resources() == {"CPU": 1.0}
        log_extra("node", [context.get_node_id()] * len(completions))
        log_metric("step", trainer_state.step)
        return np.array([float(os.getpid())] * len(completions))

    def limits_its_time(completion):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # in a main thread only
        return float(len(completion))

    async def of_this_process(completions):
        return [float(os.getpid() == here)] * len(completions)

    lengths = lambda completions: [len(text) for text in completions]  # noqa: E731
    with a_runner(places, lengths, limits_its_time, of_this_process) as runner:
        groups = scored(runner, ["a", "bb"], ["ccc", "d"], ["e", "ff"])
    assert signal.getsignal(signal.SIGTERM) is handler
    for scores, expected in zip(groups, ([1, 2], [3, 1], [1, 2]), strict=True):
        assert [score.error for score in scores] == [""] * 4
        assert scores[0].extra == {"node": [nodes.worker.node_id] * 2}
        assert scores[0].metrics == {"step": 0.0}
        assert here not in scores[0].values
        assert [list(score.values) for score in scores[1:]] == [expected, expected, [1, 1]]


@pytest.mark.long
def test_a_lost_worker_is_a_failed_attempt(nodes, tmp_path):
    def dies_once(completions):
        with open(tmp_path / "started", "a") as file:
            file.write("x")
        if (tmp_path / "started").stat().st_size == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return [1.0] * len(completions)

    def dies(completions):
        with open(tmp_path / "dying", "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    with a_runner(dies_once, dies, reward_retries=1) as runner:
        [[revived, dead]] = scored(runner, "ab")
    assert (revived.error, revived.values.tolist()) == ("", [1.0, 1.0])
    assert "WorkerCrashedError" in dead.error
    assert dead.num_failures == 2
    assert (tmp_path / "dying").read_text() == "xx"  # Ray itself tries none again
