"""A function on the hosts of a cluster: several Ray nodes on this machine, whose TPU chips are said to be there."""

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from groupax import init_model, save_model
from groupax.satellites.launch.program import Retries
from groupax.satellites.launch.ray_functions import CpuAcceleratorConfig, TpuAcceleratorConfig, execute
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer

ROOT = Path(__file__).parents[2]
SLICE, NUM_HOSTS, CHIPS = "v4-64", 8, 4
QUICK = Retries(restarts=1, preemptions=1, backoff_s=0.1)


@pytest.mark.parametrize(
    ("accelerator", "num_hosts", "chips"), [("v4-64", 8, 4), ("v5e-8", 1, 8), ("v5e-32", 8, 4), ("v6e-16", 4, 4)]
)
def test_the_type_of_a_slice_says_how_many_hosts_there_are(accelerator, num_hosts, chips):
    config = TpuAcceleratorConfig(accelerator, execution_env={"env_vars": {"HF_TOKEN": ""}, "pip": ["math_verify"]})
    assert (config.num_hosts, config.slice.chips_per_host) == (num_hosts, chips)


def test_configs_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="no TPU slice 'v9-8'"):
        TpuAcceleratorConfig("v9-8")
    with pytest.raises(ValueError, match="env_vars must be strings, STEPS is 3"):
        CpuAcceleratorConfig(execution_env={"env_vars": {"STEPS": 3}})
    with pytest.raises(ValueError, match=r"working_dir='src' in execution_env must be a URI"):
        TpuAcceleratorConfig("v4-8", execution_env={"working_dir": "src"})
    with pytest.raises(TypeError, match="takes a function"):
        execute(CpuAcceleratorConfig())(3)


def chips(worker, name):
    """What Ray finds on a host of a slice."""
    labels = {"ray.io/tpu-slice-name": name, "ray.io/tpu-worker-id": str(worker), "ray.io/tpu-pod-type": SLICE}
    head = {f"TPU-{SLICE}-head": 1} if worker == 0 else {}
    return {"num_cpus": 2, "resources": {"TPU": CHIPS, **head}, "labels": labels}


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("TPU_NAME", "slice")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_DEDUP_LOGS", "0")
        ray = pytest.importorskip("ray")
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes.slice = [nodes.add_node(**chips(worker, "slice")) for worker in reversed(range(NUM_HOSTS))][::-1]
        ray.init(address=nodes.address, log_to_driver=True)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.mark.long
def test_mistakes_and_spent_budgets_end_with_the_traceback(cluster):
    from groupax.core.errors import RunError

    @execute(CpuAcceleratorConfig(2, wait_s=120.0), retries=replace(QUICK, grace_s=5.0))
    def mistaken():
        raise ValueError("beta must be positive")

    with pytest.raises(RunError, match=r"host \d of 2 failed: ValueError: beta must be positive") as raised:
        mistaken()
    assert "in mistaken" in str(raised.value)

    told = []

    @execute(CpuAcceleratorConfig(1, wait_s=120.0), retries=replace(QUICK, grace_s=5.0), log=told.append)
    def preempted():
        raise SystemExit(75)

    with pytest.raises(RunError, match="was preempted"):
        preempted()
    assert len(told) == 2

    @execute(CpuAcceleratorConfig(1, cpus_per_host=99, wait_s=1.0))
    def never():
        pass

    with pytest.raises(TimeoutError, match="1 nodes with 99 CPU were not free within 1 s"):
        never()


@pytest.mark.long
def test_training_goes_on_after_a_lost_node_to_the_same_weights(cluster, tmp_path):
    """Two hosts are the processes of one run, whose checkpoints lie in a folder that they share."""
    model = tmp_path / "model"
    save_model(init_model({**TINY, "vocab_size": 13}), model, a_tokenizer(eos_token="<eos>"))

    def training(model, output_dir, steps):
        import time

        import jax
        import numpy as np
        import ray

        from groupax import GRPOConfig, GRPOTrainer
        from groupax.parallel import processes
        from groupax.parallel.collectives import to_host

        nodes = Path(output_dir).with_suffix(".nodes")
        nodes.mkdir(exist_ok=True)
        (nodes / os.environ["GROUPAX_PROCESS_ID"]).write_text(ray.get_runtime_context().get_node_id())

        def letters(completion_ids):
            time.sleep(0.5)
            return [ids.count(3) / len(ids) for ids in completion_ids]

        args = GRPOConfig(
            output_dir=output_dir,
            max_steps=steps,
            save_steps=1,
            prompts_per_step=4,
            num_generations=4,
            max_completion_length=16,
            learning_rate=1e-2,
            progress_bar="none",
        )
        prompts = [{"prompt": text} for text in ("abc", "bcd", "ca", "dabc")]
        trainer = GRPOTrainer(model, letters, args, prompts)
        step = trainer.train().num_steps
        params = to_host(trainer.learner.state.params)
        return processes.num_processes(), step, [np.asarray(leaf) for leaf in jax.tree.leaves(params)]

    environment = {"env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}}
    config = CpuAcceleratorConfig(2, cpus_per_host=2, execution_env=environment, wait_s=300.0)
    steps = 6
    expected = execute(config, retries=Retries(restarts=0, preemptions=0))(training)(
        str(model), str(tmp_path / "undisturbed"), steps
    )
    assert [(num, step) for num, step, _ in expected] == [(2, steps)] * 2
    told, lost = [], []

    def lose_a_node():
        while not (tmp_path / "run" / "checkpoints" / "step_000002").exists():
            time.sleep(0.1)
        name = (tmp_path / "run.nodes" / "1").read_text()
        lost.append(next(worker for worker, node in enumerate(cluster.slice) if node.node_id == name))
        cluster.remove_node(cluster.slice[lost[0]], allow_graceful=False)

    def replace_it(why):  # in the main thread, as Ray needs it
        told.append(why)
        cluster.slice[lost[0]] = cluster.add_node(**chips(lost[0], "slice"))

    thread = threading.Thread(target=lose_a_node)
    thread.start()
    disturbed = execute(config, retries=QUICK, log=replace_it)(training)(str(model), str(tmp_path / "run"), steps)
    thread.join()
    assert len(told) == 1
    assert "host 1 of 2 was lost" in told[0]
    for (*_, after_loss), (*_, undisturbed) in zip(disturbed, expected, strict=True):
        assert all((a == b).all() for a, b in zip(after_loss, undisturbed, strict=True))


@pytest.mark.long
def test_launch_ray_runs_a_program_on_all_hosts(cluster, tmp_path):
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "print('runs', os.environ['GROUPAX_PROCESS_ID'], os.environ['TOKEN'], os.environ['ALSO'], sys.argv[1:])\n"
        f"assert os.environ['RAY_ADDRESS'] == {cluster.address!r}\n"
        "sys.exit(int(os.environ['GROUPAX_PROCESS_ID']) * int(sys.argv[1]))\n"
    )

    def launched(status):
        options = ["--address", cluster.address, "--hosts", "2", "--env", "TOKEN=it's", "ALSO", "--restarts", "1"]
        command = [sys.executable, "-m", "groupax", "launch", "ray", *options, "--backoff_s", "0", "--working_dir", "."]
        command += ["--", "python", "program.py", status]
        environment = {**os.environ, "ALSO": "of here"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    done = launched("0")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = re.findall(r"\(host (\d) .*(runs .*)", done.stdout)
    assert sorted(lines) == [(number, f"runs {number} it's of here ['0']") for number in "01"]
    failed = launched("3")
    assert failed.returncode == 1
    assert failed.stderr.count("host 1 of 2 failed: RunError: the process failed with status 3") >= 2
