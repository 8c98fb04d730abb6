"""TRL's own tests of tools and environments, with groupax.compat.trl in the place of TRL."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from groupax.compat import trl

from . import trl_tool_loss
from .test_compat_agents import Scripted

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
NUM_TESTS = len(NAMED) + 2 + len(DISPATCH)  # one of them with three lists of tools
LISTS_OF_TOOLS = "[[multiply_tool], [async_multiply_tool]"  # to which the list of both is added


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
    assert LISTS_OF_TOOLS in swapped
    swapped = swapped.replace(LISTS_OF_TOOLS, f"{LISTS_OF_TOOLS}, [multiply_tool, async_multiply_tool]")
    (package / "test_grpo_trainer.py").write_text(swapped)
    cache = tmp_path / "hub"
    subprocess.run([sys.executable, THEIRS / "make_models.py", cache], check=True, capture_output=True, timeout=900)
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
        [*command, *nodes], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert f"{NUM_TESTS} passed" in done.stdout, done.stdout[-4000:] + done.stderr[-1000:]


class Written(Scripted):
    """A sampler of written turns, in the place of a run's engine."""

    def __init__(self, turns, tokenizer, engine):
        super().__init__(None, engine)
        self.engine, self.tokenizer, self.left = engine, tokenizer, [list(each) for each in turns]

    def sequences(self, *arguments, **named):
        return self.engine.sequences(*arguments, **named)

    def step(self):
        pending, self.pending = self.pending, []
        for sequence in pending:
            sequence.tokens = self.tokenizer.encode(self.left[sequence.sample_index].pop(0))
            sequence.finish_reason = "stop"
            sequence.policy_logps = sequence.sampler_logps = [-1.0] * len(sequence.tokens)
            yield sequence, len(sequence.tokens)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_loss_and_gradient_of_episodes_with_tools_equal_those_of_trl(tmp_path):
    tokenizer = THEIRS.parents[1] / "tokenizers" / "qwen"
    if not tokenizer.exists():
        pytest.skip(f"there is no tokenizer in {tokenizer}")
    pytest.importorskip("trl")
    folders = [str(tokenizer), str(tmp_path / "model"), str(tmp_path / "trl")]
    command = [sys.executable, HERE / "trl_tool_loss.py", *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    [inputs] = theirs["inputs"]

    args = trl.GRPOConfig(str(tmp_path / "run"), disable_tqdm=True, **trl_tool_loss.SETTINGS)
    trainer = trl.GRPOTrainer(
        folders[1], trl_tool_loss.reward, args, trl_tool_loss.ROWS * 4, tools=[trl_tool_loss.multiply]
    )
    collector = trainer.native.collector
    collector.engine = Written(trl_tool_loss.TURNS, trainer.processing_class, collector.engine)
    trained = []
    cut = collector.cut
    collector.cut = lambda groups: trained.append(cut(groups)) or trained[-1]
    trainer.train()

    rows = [row for minibatch in trained[0] for row in minibatch]
    expected = [  # of each row in TRL's order: tokens, the mask of the loss, the advantage
        (
            [token for token, kept in zip(ids, completion, strict=True) if kept],
            [bool(own) for own, kept in zip(tool, completion, strict=True) if kept],
            pytest.approx(advantage, abs=1e-5),
        )
        for ids, completion, tool, advantage in zip(
            *(inputs[name] for name in ("completion_ids", "completion_mask", "tool_mask", "advantages")), strict=True
        )
    ]
    ours = {
        tuple(row.completion.tolist()): (row.mask.tolist(), float(row.advantages.max(initial=-9, where=row.mask)))
        for row in rows
    }
    for ids, mask, advantage in expected:
        assert ours[tuple(ids)] == (mask, advantage)
    line, reference = trainer.state.log_history[-1], theirs["line"]
    assert line["loss_tokens"] == inputs["num_items_in_batch"]
    for name in (
        "loss",
        "grad_norm",
        "entropy",
        "completions/mean_length",
        "tools/call_frequency",
        "tools/failure_frequency",
    ):
        assert line[name] == pytest.approx(reference[name], rel=1e-5), name
