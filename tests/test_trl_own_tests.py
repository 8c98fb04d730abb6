"""TRL's own tests of tools and environments, with groupax.compat.trl in the place of TRL."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
THEIRS = HERE.parents[1] / "shared" / "peers" / "trl_tests"
NAMED = (
    "test_train_with_tools",
    "test_train_with_multiple_environments",
    "test_train_with_unknown_environment_raises",
    "test_train_with_environment_factory",
    "test_train_with_environment_owned_reward",
    "test_environment_owned_reward_coexists_with_reward_funcs",
    "test_environment_owned_reward_mixed_environments",
    "test_no_reward_source_raises",
    "test_dataset_required_without_environment",
    "test_environment_owned_data_requires_max_steps",
    "test_multiple_environments_without_dataset_raises",
    "test_train_with_environment_owned_data",
    "test_train_with_malformed_tool_calls",
)
DISPATCH = ("test_generate_prefers_rollout_func", "test_generate_rollout_func_raises_when_required_keys_are_missing")
NUM_TESTS = len(NAMED) + 1 + len(DISPATCH)  # one of them with two kinds of tools


@pytest.mark.parity
def test_trls_own_tests_of_tools_and_environments_pass(tmp_path):
    if not THEIRS.exists():
        pytest.skip(f"TRL's tests are not in {THEIRS}")
    pytest.importorskip("trl")
    package = tmp_path / "trl_tests"
    package.mkdir()
    for name in ("conftest.py", "testing_utils.py", "testing_constants.py", "zen.py"):
        shutil.copy(THEIRS / name, package)
    shutil.copy(HERE / "trl_generate.py", tmp_path)
    (package / "__init__.py").touch()
    tests = (THEIRS / "test_grpo_trainer.py").read_text()
    swapped = tests.replace(
        "from trl import GRPOConfig, GRPOTrainer", "from groupax.compat.trl import GRPOConfig, GRPOTrainer"
    )
    assert swapped != tests
    (package / "test_grpo_trainer.py").write_text(swapped)
    cache = tmp_path / "hub"
    subprocess.run([sys.executable, THEIRS / "make_models.py", cache], check=True, capture_output=True, timeout=300)
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(HERE.parent))),
        "SHIM": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "trl_generate",
        "-rA",
        "--tb=short",
    ]
    nodes = [f"trl_tests/test_grpo_trainer.py::TestGRPOTrainer::{name}" for name in NAMED]
    nodes += [f"trl_tests/test_grpo_trainer.py::TestGRPORolloutDispatch::{name}" for name in DISPATCH]
    done = subprocess.run(
        [*command, *nodes], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert f"{NUM_TESTS} passed" in done.stdout, done.stdout[-4000:] + done.stderr[-1000:]
