"""TRL's own scripts with groupax.compat.trl in the place of TRL."""

import importlib.util
from pathlib import Path

import pytest

SMALL = ("--max_steps", "2", "--learning_rate", "1e-3", "--max_completion_length", "32")
ACCURACY = ("--dataset_name", "trl-lib/DeepMath-103K", "--reward_funcs", "accuracy_reward", "think_format_reward")
REWARD_MODEL = ("--dataset_name", "trl-lib/tldr", "--reward_model_name_or_path", "reward_model")
LORA = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    pytest.importorskip("trl")
    from dev import trl_runs

    if not trl_runs.TOKENIZER.exists():
        pytest.skip(f"there is no tokenizer in {trl_runs.TOKENIZER}")
    folder = tmp_path_factory.mktemp("world") / "math"
    trl_runs.make_world(folder, "math", steps=100)  # it writes some turns by then
    return folder


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("output_dir", "arguments"), [("functions", ACCURACY), ("reward_model_and_lora", (*REWARD_MODEL, *LORA))]
)
def test_trls_script_of_grpo_saves_a_trained_model(world, output_dir, arguments):
    from dev import trl_runs

    scripts = importlib.util.find_spec("trl.scripts.grpo")
    assert scripts is not None
    assert scripts.origin is not None
    source = trl_runs.with_import_changed(Path(scripts.origin).read_text())
    given = ("--model_name_or_path", "Qwen/Qwen3-0.6B", "--output_dir", output_dir, "--report_to", "none")
    outcome = trl_runs.run_script(world, source, (*given, *SMALL, *arguments))
    assert outcome.failure is None, outcome.output[-3000:]
    assert outcome.saved == output_dir
    assert outcome.change > 1e-4
