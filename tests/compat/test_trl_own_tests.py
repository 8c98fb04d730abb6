"""TRL's own tests of its GRPO trainer, in which nothing but the import is changed."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

from groupax.compat import trl
from tests.quick_flags import FLAGS, known

from . import trl_tool_loss
from .test_compat_agents import Scripted

HERE = Path(__file__).parent
THEIRS = HERE.parents[2] / "shared" / "peers" / "trl_tests"
FILE = "trl_tests/test_grpo_trainer.py"
# The installed TRL may lack what another version's tests ask it for: whether some package is there.
PLUGIN = """
import importlib


def lacking(name):
    if not name.startswith("is_"):
        raise AttributeError(name)
    return lambda: False


importlib.import_module("trl.import_utils").__getattr__ = lacking
"""
# The tests that cannot pass, by the reason, as docs/coming_from_trl.md has it.
NOT_APPLICABLE = {
    "models and data with images, which are only on the hub": (14, ["TestGRPOTrainerVLM::test_train_*"]),
    "the family `nemotron_h`, which groupax does not have": (1, ["*::test_train[[]*NemotronHForCausalLM-nano[]]"]),
    "adapters of parameters (`target_parameters`), which are refused": (1, ["*::test_train_moe_peft_model"]),
    "private methods and attributes of TRL's trainer (`_generate`, `_env_tools`, `_logs`)": (
        6,
        [
            "TestGRPORolloutDispatch::test_generate_*",
            "*::test_train_with_multiple_environments",
            "*::test_train_reward_func_with_log_extra",
            "*::test_entropy_bonus_flows_gradients",
        ],
    ),
    "attributes of TRL's trainer (`ref_model`, `tools`, `reward_funcs` of environments)": (
        3,
        ["*::test_train_with_sync_ref_model", "*::test_environment_owned_reward_*"],
    ),
    "streaming datasets, which are refused": (
        10,
        [
            "*::test_train_with_iterable_dataset",
            "*::test_iterable_*",
            "*::test_init_with_eval_dataset[[]*iterable*",
            "*::test_evaluate_with_eval_dataset[[]*iterable*",
        ],
    ),
    "rewards that are None for all completions, with which a run stops": (
        1,
        ["*::test_warning_raised_all_rewards_none"],
    ),
    "helpers of the loss (`get_high_entropy_mask`, `get_off_policy_mask`) on PyTorch's tensors": (
        8,
        ["TestGetHighEntropyMask::*", "*::test_get_off_policy_mask*"],
    ),
    "data loaders and micro-batches of PyTorch (`get_train_dataloader`, `training_step`)": (
        1,
        ["*::test_prepare_input_called_with_correct_data"],
    ),
    "a replaced `generate`: groupax's own engine samples": (
        5,
        [
            "*::test_train_with_mask_truncated_completions",
            "*::test_train_with_tools[[]*",
            "*::test_train_with_environment_factory",
            "*::test_train_with_environment_owned_reward",
        ],
    ),
    "Liger's kernels must be installed, which TRL 1.16 does not ask for either": (2, ["*::test_liger_kernel_*allowed"]),
    "beam search (`num_beams`, `length_penalty`), which is refused": (1, ["*::test_train_with_generation_kwargs"]),
    "an unknown environment, which is refused when the trainer is made": (
        1,
        ["*::test_train_with_unknown_environment_raises"],
    ),
    "code from a model's folder, which groupax never runs": (1, ["*::test_trust_remote_code"]),
}
NUM_PASSING = 89


def run_theirs(folder):
    """Runs TRL's tests with the import changed; returns the outcome and the error of each test."""
    if not THEIRS.exists():
        pytest.skip(f"TRL's tests are not in {THEIRS}")
    pytest.importorskip("trl")
    package = folder / "trl_tests"
    package.mkdir()
    for name in ("conftest.py", "testing_utils.py", "testing_constants.py", "zen.py"):
        shutil.copy(THEIRS / name, package)
    (package / "__init__.py").touch()
    (folder / "of_trl.py").write_text(PLUGIN)
    tests = (THEIRS / "test_grpo_trainer.py").read_text()
    swapped = tests.replace(
        "from trl import GRPOConfig, GRPOTrainer", "from groupax.compat.trl import GRPOConfig, GRPOTrainer"
    )
    assert swapped != tests
    (folder / FILE).write_text(swapped)
    cache, outcomes = folder / "hub", folder / "outcomes.jsonl"
    subprocess.run([sys.executable, THEIRS / "make_models.py", cache], check=True, capture_output=True, timeout=900)
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join((str(folder), str(HERE.parents[1]))),
        "XLA_FLAGS": " ".join(f"--{name}={FLAGS[name]}" for name in FLAGS if name in known()),
        "RES": str(outcomes),
    }
    options = ["-q", "-p", "no:cacheprovider", "-p", "of_trl", "--tb=no", "-n", "2"]
    command = [sys.executable, "-m", "pytest", *options, FILE]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=7200)
    assert outcomes.exists(), done.stdout[-4000:] + done.stderr[-2000:]
    lines = map(json.loads, outcomes.read_text().splitlines())
    return {name: (outcome, error) for name, outcome, _, error in lines}


@pytest.mark.long
def test_all_of_trls_own_tests_pass_that_apply(tmp_path):
    outcomes = run_theirs(tmp_path)
    failed = {name: error for name, (outcome, error) in outcomes.items() if outcome == "failed"}
    reasons = {name: reason_of(name) for name in failed}
    unexpected = {name: failed[name] for name, reason in reasons.items() if reason is None}
    assert not unexpected, json.dumps(unexpected, indent=1)
    assert Counter(reasons.values()) == {reason: number for reason, (number, _) in NOT_APPLICABLE.items()}
    assert Counter(outcome for outcome, _ in outcomes.values())["passed"] == NUM_PASSING


def reason_of(name):
    """Returns why a test of TRL cannot pass, or None if it should."""
    found = [why for why, (_, names) in NOT_APPLICABLE.items() if any(fnmatch(name, each) for each in names)]
    return next(iter(found), None)


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
    line, reference = next(each for each in trainer.state.log_history if "loss_tokens" in each), theirs["line"]
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
