"""The examples run to their ends, on a small model."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from groupax import load_model
from tests.conftest import SHARED

EXAMPLES = Path(__file__).parents[2] / "examples"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_the_qlora_example_runs(stories, tmp_path, capsys):
    data = SHARED / "data" / "gsm8k"
    if not data.is_dir():
        pytest.skip(f"no {data}")
    model = shutil.copytree(stories, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    flags = f"--model {model} --dataset {data} --output_dir {tmp_path}/run --max_steps 2 --num_train 4 --num_test 4"
    more = "--prompts_per_step 2 --max_completion_length 16 --chat_template plain"
    results = loaded("gsm8k_qlora").main(f"{flags} {more}".split())
    assert results == {"before": 0.0, "after": 0.0}  # a story model
    assert "right on 4 test problems: 0.0% -> 0.0%" in capsys.readouterr().out
    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()
    assert load_model(tmp_path / "run" / "merged").adapter is None
    assert json.loads((tmp_path / "run" / "merged_4bit" / "config.json").read_text())["quantization_config"]
