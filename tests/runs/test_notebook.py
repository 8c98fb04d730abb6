"""What evaluations show of themselves, and the notebooks of examples/."""

import json
import math
from pathlib import Path

import pytest

from groupax import init_model, save_model
from groupax.core.settings.sampling import SamplingParams
from groupax.evaluation.evaluate import Evaluation, SetEvaluation
from groupax.evaluation.items import Item
from groupax.rollouts.estimates import Estimate
from tests.conftest import TINY
from tests.data.chat_tokenizers import VOCAB_SIZE, chat_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_evaluations_show_estimates_with_intervals():
    estimates = {
        "pass@1": Estimate(0.5, 0.25, 0.75, "wilson", 10),
        "reward": Estimate(1 / 3, math.nan, math.nan, "", 1),
    }
    one = SetEvaluation([Item("a", 0, "prompt", {}, [], False)], estimates, {}, SamplingParams(), None, {})
    none = SetEvaluation([], {}, {}, SamplingParams(), None, {})
    assert repr(one) == "<SetEvaluation: 1 prompts: pass@1 0.500 [0.250, 0.750], reward 0.333>"
    assert str(Evaluation({"a": one, "b": none})).splitlines()[1:] == ["             b, 0 prompts: no reward applies>"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert cells[0]["cell_type"] == "markdown"
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            compile("".join(cell["source"]), path.name, "exec")


# What makes a notebook small: its texts, and what stands for them in a test.
PROBLEMS = [
    {"question": f"Ann has {n} apples and buys 4. How many are there?", "answer": f"{n}+4\n#### {n + 4}"}
    for n in range(8)
]
FILES = {"train": "rows.jsonl", "test": "rows.jsonl"}
SMALLER = {
    "first_reward": {"max_steps=60": "max_steps=1", "range(1000)": "range(24)", "800]": "16]", "rows[800:": "rows[16:"},
    "gsm8k_lora": {
        'load_dataset("openai/gsm8k", "main")': f"load_dataset('json', data_files={FILES})",
        "Qwen/Qwen2.5-0.5B-Instruct": "model",
        "max_steps=100": "max_steps=1",
        "prompts_per_step=8": "prompts_per_step=2",
        "max_completion_length=256": "max_completion_length=16",
        "range(200)": "range(4)",
    },
    "tools": {"max_steps=50": "max_steps=1", "1024": "20", "-100": "-4", "prompts_per_step=8": "prompts_per_step=2"},
}


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize("name", SMALLER)
def test_a_notebook_runs_and_changes_its_cell_in_place(name, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="the parity extra has nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")
    if name == "gsm8k_lora":
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
        sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}
        save_model(init_model({**TINY, **sizes}), tmp_path / "model", chat_tokenizer())
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", 4)
    for cell in notebook.cells:
        for text, smaller in SMALLER[name].items():
            cell.source = cell.source.replace(text, smaller)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    training = next(cell for cell in notebook.cells if "trainer.train()" in cell.source)
    html = [output.data["text/html"] for output in training.outputs if "text/html" in output.get("data", {})]
    assert sum("step 1/1" in each for each in html) == 1  # however often it changed
    assert any((tmp_path / "runs" / name / "model").glob("*config.json"))
