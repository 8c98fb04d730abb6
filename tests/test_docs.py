"""The Python on pages that promise to run does run."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from groupax import init_model, save_model

from .conftest import TINY, rest_heavy
from .test_config_and_data import a_tokenizer
from .test_trainer import a_trainer, lines_of

DOCS = Path(__file__).parents[1] / "docs"


PAGES = [
    "algorithm.md",
    "datasets.md",
    "rewards.md",
    "engine.md",
    "evaluation.md",
    "coming_from_trl.md",
    "coming_from_easydel.md",
]


@pytest.mark.parametrize("page", rest_heavy([*PAGES, "lora.md"], quick=len(PAGES)))
def test_python_blocks_run(page, tmp_path):
    tokenizer = a_tokenizer(eos_token="<eos>")
    save_model(init_model({**TINY, "vocab_size": 13, "max_position_embeddings": 512}), tmp_path / "model", tokenizer)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    namespace = {"folder": tmp_path / "model"}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
    assert blocks


def test_the_pages_list_every_built_in_reward():
    from groupax.rewards.builtin import BUILTIN_REWARDS

    text = (DOCS / "rewards.md").read_text()
    assert [name for name in BUILTIN_REWARDS if f"`{name}" not in text] == []


def test_the_pages_list_every_sampling_setting():
    from groupax.settings.sampling import SamplingParams

    text = (DOCS / "engine.md").read_text()
    assert [field.name for field in fields(SamplingParams) if f"`{field.name}`" not in text] == []


def test_the_pages_list_every_setting_of_the_objective():
    from groupax.settings.objective import LossType, ObjectiveSettings

    text = (DOCS / "algorithm.md").read_text()
    own = {"entropy_bonus", "temperature"}  # ours, and told in words
    for name in {*ObjectiveSettings.__annotations__} - own:
        assert re.sub("_(pos|neg|min|max)$", "", name) in text, name
    assert [name for name in LossType.__args__ if f"`{name}`" not in text] == []


def test_the_page_s_own_loss_trains(tmp_path, monkeypatch):
    page = (DOCS / "algorithm.md").read_text()
    module = re.search(r"^```python\n(# my_losses.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert module is not None
    (tmp_path / "my_losses.py").write_text(module[1])
    monkeypatch.syspath_prepend(tmp_path)
    a_trainer(tmp_path, loss_type="my_losses:GMPO(epsilon=0.3)", max_steps=1).train()
    assert "gmpo/clipped_frac" in lines_of(tmp_path)[0]
    assert '"my_losses:GMPO(epsilon=0.3)"' in (tmp_path / "run" / "config.json").read_text()
