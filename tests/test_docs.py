"""The Python on pages that promise to run does run."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from groupax import init_model, save_model

from .chat_tokenizers import chat_tokenizer
from .conftest import TINY, rest_heavy
from .test_config_and_data import a_tokenizer
from .test_trainer import a_trainer, lines_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


PAGES = [
    "algorithm.md",
    "datasets.md",
    "rewards.md",
    "engine.md",
    "evaluation.md",
    "episodes.md",
    "coming_from_trl.md",
    "coming_from_easydel.md",
]


@pytest.mark.parametrize("page", rest_heavy([*PAGES, "lora.md", "sft.md"], quick=len(PAGES)))
def test_python_blocks_run(page, tmp_path):
    tokenizer = chat_tokenizer() if page == "episodes.md" else a_tokenizer(eos_token="<eos>")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048 if page == "episodes.md" else 512}
    save_model(init_model({**TINY, **sizes}), tmp_path / "model", tokenizer)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    namespace = {"folder": tmp_path / "model"}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
    assert blocks


def test_the_readme_s_example_trains(tmp_path, monkeypatch):
    save_model(init_model({**TINY, "vocab_size": 13}), tmp_path / "model", a_tokenizer(eos_token="<eos>"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "cab"}\n')
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    code = block[1].replace("Qwen/Qwen3-0.6B", str(tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    exec(code.replace("GRPOConfig(", "GRPOConfig(max_steps=1, max_completion_length=8, "), {})
    assert (tmp_path / "runs/len/model/config.json").is_file()


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    links = [(page, target) for page in pages for target in LINK.findall(page.read_text())]
    assert [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()] == []


def test_the_readme_and_the_index_link_every_page():
    for start in (ROOT / "README.md", DOCS / "index.md"):
        linked = {(start.parent / target).resolve() for target in LINK.findall(start.read_text())}
        assert [page.name for page in sorted(DOCS.glob("*.md")) if page not in {*linked, start}] == []


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
