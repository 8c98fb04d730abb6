"""TRL's own tests of its GRPO trainer, in which nothing but the import is changed."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from groupax.compat import trl
from tests.quick_flags import FLAGS, known

from . import trl_tool_loss
from .test_compat_agents import Scripted

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "coming_from_trl.md"
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
# A part of the tests that takes some minutes, of everything that they are about, to run by itself.
PART = (
    "test_compute_entropy_mask_lower_threshold",
    "test_get_off_policy_mask_padding",
    "test_train[trl-internal-testing/tiny-Qwen2ForCausalLM-2.5]",
    "test_train_with_iterable_dataset",
    "test_evaluate_with_eval_dataset[dict_of_iterable_dataset]",
    "test_warning_raised_all_rewards_none",
    "test_correct_reward_processing_classes_list",
    "test_train_with_environment_factory",
    "test_train_with_environment_owned_reward",
    "test_environment_owned_reward_coexists_with_reward_funcs",
    "test_environment_owned_reward_mixed_environments",
    "test_no_reward_source_raises",
    "test_dataset_required_without_environment",
    "test_environment_owned_data_requires_max_steps",
    "test_multiple_environments_without_dataset_raises",
    "test_train_with_environment_owned_data",
)

# The tests that cannot pass, by the reason, as docs/coming_from_trl.md has it.
NOT_APPLICABLE = {
    "models and data with images, which are only on the hub": (
        *(
            f"TestGRPOTrainerVLM::test_train_vlm[trl-internal-testing/tiny-{name}]"
            for name in (
                "Gemma3ForConditionalGeneration",
                "Gemma4ForConditionalGeneration",
                "LlavaNextForConditionalGeneration",
                "Qwen2_5_VLForConditionalGeneration",
                "Qwen2VLForConditionalGeneration",
                "Qwen3_5ForConditionalGeneration-NoThink",
                "Qwen3_5MoeForConditionalGeneration-3.6",
            )
        ),
        *(
            f"TestGRPOTrainerVLM::{name}[trl-internal-testing/tiny-Qwen2_5_VLForConditionalGeneration]"
            for name in (
                "test_train_vlm_beta_non_zero",
                "test_train_vlm_peft",
                "test_train_vlm_and_importance_sampling",
                "test_train_vlm_multi_image",
            )
        ),
        "TestGRPOTrainerVLM::test_train_vlm_with_pad_to_multiple_of",
        "TestGRPOTrainerVLM::test_train_vlm_log_multimodal_false",
        "TestGRPOTrainerVLM::test_train_with_tools_multimodal_response",
    ),
    "the family `nemotron_h`, which groupax does not have": (
        "TestGRPOTrainer::test_train[trl-internal-testing/tiny-NemotronHForCausalLM-nano]",
    ),
    "adapters of parameters (`target_parameters`), which are refused": ("TestGRPOTrainer::test_train_moe_peft_model",),
    "private methods and attributes of TRL's trainer (`_generate`, `_env_tools`, `_logs`)": (
        "TestGRPORolloutDispatch::test_generate_prefers_rollout_func",
        "TestGRPORolloutDispatch::test_generate_rollout_func_syncs_vllm_weights_when_needed",
        "TestGRPORolloutDispatch::test_generate_rollout_func_raises_when_required_keys_are_missing",
        "TestGRPOTrainer::test_train_with_multiple_environments",
        "TestGRPOTrainer::test_train_reward_func_with_log_extra",
        "TestGRPOTrainer::test_entropy_bonus_flows_gradients",
    ),
    "data loaders and micro-batches of PyTorch (`get_train_dataloader`, `training_step`)": (
        "TestGRPOTrainer::test_iterable_eval_keeps_map_style_train_workers",
        "TestGRPOTrainer::test_prepare_input_called_with_correct_data",
    ),
    "a replaced `GenerationMixin.generate`: a model given by its name has no class of PyTorch": (
        "TestGRPOTrainer::test_train_with_mask_truncated_completions",
    ),
    "Liger's kernels must be installed, which TRL 1.16 does not ask for either": (
        "TestGRPOTrainer::test_liger_kernel_with_peft_non_lm_head_target_allowed",
        "TestGRPOTrainer::test_liger_kernel_with_peft_modules_to_save_lm_head_allowed",
    ),
    "beam search (`num_beams`, `length_penalty`), which is refused": (
        "TestGRPOTrainer::test_train_with_generation_kwargs",
    ),
    "an unknown environment, which is refused when the trainer is made": (
        "TestGRPOTrainer::test_train_with_unknown_environment_raises",
    ),
    "code from a model's folder, which groupax never runs": ("TestGRPOTrainer::test_trust_remote_code",),
}
NUM_PASSING = 114


def run_theirs(folder, select=()):
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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "of_trl", "--tb=no"]
    nodes = [f"{FILE}::{_class_of(tests, name)}::{name}" for name in select] or [FILE]
    done = subprocess.run([*command, *nodes], cwd=folder, env=environment, capture_output=True, text=True, timeout=7200)
    assert outcomes.exists(), done.stdout[-4000:] + done.stderr[-2000:]
    lines = map(json.loads, outcomes.read_text().splitlines())
    return {name: (outcome, error) for name, outcome, _, error in lines}


def _class_of(source, test):
    """Returns the class of a test: the last one that begins before it."""
    before = source[: source.index(f"def {test.partition('[')[0]}(")]
    return before.rpartition("\nclass ")[2].partition("(")[0].partition(":")[0]


@pytest.mark.long
def test_a_part_of_trls_own_tests_passes(tmp_path):
    outcomes = run_theirs(tmp_path, PART)
    assert len(outcomes) == len(PART)
    assert {name: each for name, each in outcomes.items() if each[0] != "passed"} == {}


@pytest.mark.long
def test_all_of_trls_own_tests_pass_that_apply(tmp_path):
    outcomes = run_theirs(tmp_path)
    failed = {name: error for name, (outcome, error) in outcomes.items() if outcome == "failed"}
    reasons = {test: reason for reason, tests in NOT_APPLICABLE.items() for test in tests}
    unexpected = {name: error for name, error in failed.items() if name not in reasons}
    assert not unexpected, json.dumps(unexpected, indent=1)
    assert failed.keys() == reasons.keys()
    assert Counter(outcome for outcome, _ in outcomes.values())["passed"] == NUM_PASSING


def test_the_page_says_which_of_trls_tests_do_not_apply():
    page = " ".join(PAGE.read_text().split())
    for reason, tests in NOT_APPLICABLE.items():
        assert f"| {reason} | {len(tests)} |" in page, reason
    assert f"| pass | {NUM_PASSING} |" in page


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
