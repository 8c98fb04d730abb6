"""The Python on pages that promise to run does run."""

import contextlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import sys
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from groupax import GRPOConfig, SamplingParams, SFTConfig, init_model, load_model, save_model
from groupax.cli.main import COMMANDS, main
from groupax.objective.losses import LOSSES
from groupax.rewards import BUILTIN_REWARDS
from tests.conftest import SHARED, TINY, rest_heavy
from tests.data.chat_tokenizers import chat_tokenizer
from tests.data.test_config_and_data import a_tokenizer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


PAGES = ["algorithm.md", "datasets.md", "rewards.md", "evaluation.md", "coming_from_trl.md", "coming_from_easydel.md"]


HEAVY_PAGES = ["engine.md", "episodes.md", "lora.md", "sft.md", "replay.md"]
TUTORIALS = ["first_reward.md", "hacked_reward.md", "reading_a_run.md"]  # each goes on where the one before has ended
# Pages whose Python is run by other tests than `test_python_blocks_run`.
RUN_ELSEWHERE = {
    "README.md": "test_the_readme_s_example_trains",
    "monitoring.md": "tests/runs/test_rollout_log.py and tests/runs/test_trackers.py",
    "serving.md": "test_the_clients_of_the_page_about_serving_are_answered",
}


@pytest.mark.parametrize("page", rest_heavy([*PAGES, *HEAVY_PAGES], quick=len(PAGES), drawn=2))
def test_python_blocks_run(page, tmp_path):
    tokenizer = chat_tokenizer() if page == "episodes.md" else a_tokenizer(eos_token="<eos>")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048 if page == "episodes.md" else 512}
    save_model(init_model({**TINY, **sizes}), tmp_path / "model", tokenizer)
    namespace = {"folder": tmp_path / "model"}
    blocks = python_blocks(DOCS / page)
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
    assert blocks


def python_blocks(page):
    return [block for language, block in BLOCK.findall(page.read_text()) if language == "python"]


def test_all_python_of_the_pages_is_run_or_has_a_reason():
    with_python = [page.name for page in [ROOT / "README.md", *DOCS.glob("*.md")] if python_blocks(page)]
    assert sorted(with_python) == sorted([*PAGES, *HEAVY_PAGES, *TUTORIALS, *RUN_ELSEWHERE])


def as_a_reader(page, namespace):
    """Does what a tutorial tells its reader, with less data and fewer steps; returns the commands that were run."""
    text = (DOCS / page).read_text()
    smaller = {"range(1000)": "range(24)", "800]": "16]", "rows[800:": "rows[16:", "_steps 20": "_steps 2"}
    for full, small in smaller.items():
        text = text.replace(full, small)
    commands: list[str] = []
    for language, block in BLOCK.findall(text):
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


@pytest.mark.heavy
def test_a_reader_of_the_tutorials_gets_what_they_promise(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {}
    commands = as_a_reader("first_reward.md", namespace)
    assert [command.split()[1] for command in commands][1:] == ["init", "train", "generate", "report", "train", "train"]
    sys.modules.pop("my_rewards")
    as_a_reader("hacked_reward.md", namespace)
    assert "rewards/brief/mean" in (tmp_path / "runs/hacked/metrics.jsonl").read_text()
    as_a_reader("reading_a_run.md", namespace)
    assert list(namespace["column"]("runs/sums", "reward")) == [1]
    sys.modules.pop("my_rewards")
    assert "before and after" in capsys.readouterr().out


@pytest.mark.heavy
def test_the_clients_of_the_page_about_serving_are_answered(tmp_path, monkeypatch):
    from groupax import Engine, SamplingParams
    from groupax.recipes import load_recipe
    from groupax.recipes.shapes.scenes import draw, scenes
    from groupax.serve.app import Limits, create_app
    from groupax.serve.loop import EngineLoop
    from tests.serve.test_server import demo_model, listening

    model, tokenizer = demo_model()
    text, sees = Engine.of(model, tokenizer, kv_bytes=1 << 27), Engine.load(load_recipe("shapes").model)
    draw(next(scenes(0))).save(tmp_path / "cat.png")
    monkeypatch.chdir(tmp_path)
    namespace = {
        "model": model,
        "newer_weights": model.params,
        "prompts": text.encode(["2+2=", "7*8="]),
        "params": SamplingParams(max_tokens=8),
    }
    chat, image, training = python_blocks(DOCS / "serving.md")
    loop = EngineLoop(text, "Qwen/Qwen3-0.6B").start()
    app = create_app(loop, Limits(api_keys=("SECRET",)), model)
    with closing(loop), listening(app) as address:
        exec(chat.replace("http://127.0.0.1:8000", address), namespace)
        exec(training.replace("http://one:8000", address), namespace)
    loop = EngineLoop(sees, "HuggingFaceTB/SmolVLM2-500M-Video-Instruct").start()
    with closing(loop), listening(create_app(loop)) as address:
        namespace["client"].base_url = f"{address}/v1"
        exec(image.replace("client.chat", "answer = client.chat"), namespace)
        namespace["client"].close()
    assert len(namespace["response"].choices) == 2
    assert namespace["answer"].choices[0].message.content
    assert len(namespace["finished"]) == 2


def test_the_readme_s_example_trains(tmp_path, monkeypatch):
    save_model(init_model({**TINY, "vocab_size": 13}), tmp_path / "model", a_tokenizer(eos_token="<eos>"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "cab"}\n')
    [block] = python_blocks(ROOT / "README.md")
    code = block.replace("Qwen/Qwen3-0.6B", str(tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    exec(code.replace("GRPOConfig(", "GRPOConfig(max_steps=1, max_completion_length=8, "), {})
    assert (tmp_path / "runs/len/model/config.json").is_file()


def anchors(page):
    """The ids of a page's headings, as mkdocs and GitHub derive them."""
    headings = re.findall(r"^#+ (.*)", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    links = [(page, *link) for page in pages for link in LINK.findall(page.read_text())]
    assert [f"{page.name}: {path}" for page, path, _ in links if not (page.parent / path).exists()] == []
    named = [(page, page.parent / path if path else page, anchor) for page, path, anchor in links if anchor]
    assert len(named) > 20
    assert [f"{page.name}: {to.name}#{anchor}" for page, to, anchor in named if anchor not in anchors(to)] == []


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("rewards.md", BUILTIN_REWARDS),
        ("algorithm.md", LOSSES),
        ("engine.md", [field.name for field in fields(SamplingParams)]),
    ],
)
def test_pages_name_all_that_there_is(page, names):
    assert {*names} - {*re.findall(r"\w+", (DOCS / page).read_text())} == set()


TAKE_SETTINGS = ("train", "sft", "plan", "resume")
COMMAND = re.compile(r"(?:\bgroupax|--) (launch (?:local|slurm)|[a-z_]+)((?: +(?!-- |groupax |#)\S+)*)")


def help_of(command):
    """What `groupax COMMAND --help all` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command.split(), "--help", "all"])
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def test_the_options_of_commands_on_the_pages_exist():
    settings = {f"--{field.name}" for config in (GRPOConfig, SFTConfig) for field in fields(config)}
    known = {
        name: {*re.findall(r"--\w+", help_of(name)), *(settings if name in TAKE_SETTINGS else ())}
        for name in [*COMMANDS, *(f"launch {launcher}" for launcher in ("local", "slurm"))]
    }
    wrong, num_checked = [], 0
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        text = re.sub(r"\\\n", " ", page.read_text())
        lines = [line for language, block in BLOCK.findall(text) if language != "python" for line in block.splitlines()]
        for line in [*lines, *re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))]:
            for command, words in COMMAND.findall(line):
                options = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
                num_checked += len(options)
                wrong += [f"{page.name}: {command} {option}" for option in options if option not in known[command]]
    assert wrong == []
    assert num_checked > 100


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
