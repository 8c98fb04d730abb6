"""TRL's own scripts and the snippets of its documents, with groupax.compat.trl in the place of TRL."""

import importlib.util
from pathlib import Path

import pytest

from . import trl_snippets

SMALL = ("--max_steps", "2", "--learning_rate", "1e-3", "--max_completion_length", "32")
ACCURACY = ("--dataset_name", "trl-lib/DeepMath-103K", "--reward_funcs", "accuracy_reward", "think_format_reward")
REWARD_MODEL = ("--dataset_name", "trl-lib/tldr", "--reward_model_name_or_path", "reward_model")
LORA = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    pytest.importorskip("trl")
    from . import trl_scripts

    if not trl_scripts.TOKENIZER.exists():
        pytest.skip(f"there is no tokenizer in {trl_scripts.TOKENIZER}")
    folder = tmp_path_factory.mktemp("world") / "math"
    trl_scripts.make_world(folder, "math", steps=100)  # it writes some turns by then
    return folder


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("output_dir", "arguments"),
    [("functions", ACCURACY), ("reward_model_and_lora", (*REWARD_MODEL, *LORA))],
)
def test_trls_script_of_grpo_saves_a_trained_model(world, output_dir, arguments):
    from . import trl_scripts

    scripts = importlib.util.find_spec("trl.scripts.grpo")
    assert scripts is not None
    assert scripts.origin is not None
    source = trl_scripts.with_import_changed(Path(scripts.origin).read_text())
    given = ("--model_name_or_path", "Qwen/Qwen3-0.6B", "--output_dir", output_dir, "--report_to", "none")
    outcome = trl_scripts.run_script(world, source, (*given, *SMALL, *arguments))
    assert outcome.failure is None, outcome.output[-3000:]
    assert outcome.saved == output_dir
    assert outcome.change > 1e-4


def test_snippets_are_filled_in():
    page = "```python\nargs = GRPOConfig(..., beta=0.1, max_steps=500)\n```\n```python\nx = 1\n```"
    [(index, source)] = trl_snippets.snippets(page)
    assert index == 1
    assert trl_snippets.filled(source, 1).endswith(
        "args = GRPOConfig(beta=0.1, max_steps=1, output_dir='run_1', max_completion_length=48, learning_rate=0.001, "
        "report_to='none', save_strategy='no', push_to_hub=False, per_device_train_batch_size=8, num_generations=4)"
    )
