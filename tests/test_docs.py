"""The Python on pages that promise to run does run."""

import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from groupax import init_model, save_model
from groupax.cli.main import main

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
    "evaluation.md",
    "coming_from_trl.md",
    "coming_from_easydel.md",
]


@pytest.mark.parametrize(
    "page", rest_heavy([*PAGES, "engine.md", "episodes.md", "lora.md", "adapters.md", "sft.md"], quick=len(PAGES))
)
def test_python_blocks_run(page, tmp_path):
    tokenizer = chat_tokenizer() if page == "episodes.md" else a_tokenizer(eos_token="<eos>")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048 if page == "episodes.md" else 512}
    save_model(init_model({**TINY, **sizes}), tmp_path / "model", tokenizer)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    namespace = {"folder": tmp_path / "model"}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
    assert blocks


def as_a_reader(page, namespace):
    """Does what a tutorial tells its reader, with less data and fewer steps; returns the commands that were run."""
    text = (DOCS / page).read_text()
    for full, small in {
        "range(1000)": "range(24)",
        "800]": "16]",
        "rows[800:": "rows[16:",
        "_steps 20": "_steps 2",
    }.items():
        text = text.replace(full, small)
    commands: list[str] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        file = re.match(r"# (\w+\.py)\n", block)
        if file:
            Path(file[1]).write_text(block)
        elif language == "python":
            exec(compile(block, page, "exec"), namespace)
        elif language == "yaml":
            changed = yaml.safe_load(block) | {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2}
            lines = Path("run.yaml").read_text().splitlines()
            kept = [line for line in lines if line.partition(":")[0] not in changed]
            Path("run.yaml").write_text("\n".join([*kept, yaml.safe_dump(changed)]))
        commands += [line for line in block.splitlines() if not language and line.startswith(("python ", "groupax "))]
        for line in block.splitlines() if not language else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["python"]:
                exec(compile(Path(words[1]).read_text(), words[1], "exec"), {})
            elif words[:1] == ["groupax"] and words[1] != "view" and "Qwen/Qwen2.5-0.5B-Instruct" not in words:
                assert main([word.replace("groupax/recipes", f"{ROOT}/groupax/recipes") for word in words[1:]]) == 0, (
                    line
                )
    return commands


@pytest.mark.long
def test_a_reader_of_the_tutorials_gets_what_they_promise(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {}
    commands = as_a_reader("first_reward.md", namespace)
    assert [command.split()[1] for command in commands][1:] == ["init", "train", "generate", "report", "train", "train"]
    assert "groupax train --model" in (tmp_path / "runs/sums/report.md").read_text()
    sys.modules.pop("my_rewards")
    as_a_reader("hacked_reward.md", namespace)
    assert json.loads((tmp_path / "runs/hacked/run.json").read_text())
    assert "rewards/brief/mean" in (tmp_path / "runs/hacked/metrics.jsonl").read_text()
    as_a_reader("reading_a_run.md", namespace)
    assert list(namespace["column"]("runs/sums", "reward")) == [1]
    sys.modules.pop("my_rewards")
    assert "before and after" in capsys.readouterr().out


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


@pytest.mark.heavy
def test_the_page_s_own_loss_trains(tmp_path, monkeypatch):
    page = (DOCS / "algorithm.md").read_text()
    module = re.search(r"^```python\n(# my_losses.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert module is not None
    (tmp_path / "my_losses.py").write_text(module[1])
    monkeypatch.syspath_prepend(tmp_path)
    a_trainer(tmp_path, loss_type="my_losses:GMPO(epsilon=0.3)", max_steps=1).train()
    assert "gmpo/clipped_frac" in lines_of(tmp_path)[0]
    assert '"my_losses:GMPO(epsilon=0.3)"' in (tmp_path / "run" / "config.json").read_text()
