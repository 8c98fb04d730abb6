"""The documents that users hold in their hands run."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SHARED
from tests.models.test_export import hub as hub  # a fixture

from .seed_documents import TABLE, Run, blocks_of, code_of

DOCUMENTS = sorted((SHARED / "seeds").glob("*.txt"))
pytestmark = pytest.mark.skipif(not DOCUMENTS, reason=f"no documents in {SHARED / 'seeds'}")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
RUNNER = """
import doctest, json, subprocess, sys, time
blocks, sys.argv = json.load(open(sys.argv[1])), ["train_grpo.py", *sys.argv[2:]]
names = {"__name__": "__main__"}
for name, code in blocks:
    started = time.time()
    if code.startswith("!"):
        subprocess.run(code[1:], shell=True, check=True)
    elif ">>>" in code:
        test = doctest.DocTestParser().get_doctest(code, names, name, None, 0)
        assert not doctest.DocTestRunner().run(test, clear_globs=False).failed, name
        names.update(test.globs)
    else:
        exec(compile(code, name, "exec"), names)
    print(f"ran {name} in {time.time() - started:.1f} s", flush=True)
"""


def blocks_in(document):
    [path] = [path for path in DOCUMENTS if path.name.startswith(document)]
    return blocks_of(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folders(stories, tmp_path_factory):
    """A small model with room and a chat template, and datasets under the names of the hub's."""
    folder = tmp_path_factory.mktemp("world")
    model = shutil.copytree(stories, folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    asked = {n: f"Tim has {n} apples and eats {n % 3}. How many are left?" for n in range(10, 42)}
    rows = [{"question": text, "answer": f"{n} - {n % 3}\n#### {n - n % 3}"} for n, text in asked.items()]
    more = {"completion": "none", "reference": "left"}
    prompts = [{"prompt": row["question"], "answer": row["answer"], **more} for row in rows]
    messages = [{"role": "user", "content": "?"}]
    numina = [
        {"problem": text, "solution": rf"It is $\boxed{{{n}}}$.", "messages": messages} for n, text in asked.items()
    ]
    datasets = {"prompts": prompts[:8], "gsm8k": prompts, "gsm8k_raw": rows, "numina": numina[:4]}
    for name, dataset in datasets.items():
        (folder / name).mkdir()
        files = []
        for split, part in (("train", dataset[: len(dataset) // 2]), ("test", dataset[len(dataset) // 2 :][:4])):
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
            files.append(f"  - split: {split}\n    path: {split}.jsonl\n")
        named = "main" if name.startswith("gsm8k") else "default"
        text = f"---\nconfigs:\n- config_name: {named}\n  data_files:\n{''.join(files)}---\n"
        (folder / name / "README.md").write_text(text)
    return {"model": model, "repo": "me/reasoning", **{name: folder / name for name in datasets}}


def environment(tmp_path, **more):
    """That of a user: the programs of this Python, and a cache of their own."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def run(blocks, tmp_path, *flags, **more):
    """Run blocks in a process of their own, in one namespace and with these flags; returns what they print."""
    (tmp_path / "blocks.json").write_text(json.dumps(blocks))
    (tmp_path / "runner.py").write_text(RUNNER)
    argv = [sys.executable, str(tmp_path / "runner.py"), str(tmp_path / "blocks.json"), *flags]
    out = finished(argv, tmp_path, **more)
    print(*re.findall(r"^ran .*$", out, re.MULTILINE), sep="\n")
    assert [f"ran {name} in" in out for name, _ in blocks] == [True] * len(blocks)
    return out


def finished(argv, tmp_path, **more):
    """What a program prints that ends without an error."""
    own = environment(tmp_path, **more)
    done = subprocess.run(argv, cwd=tmp_path, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def the_block(document, number, world):
    """Its code, as it runs."""
    [block] = [block for block in blocks_in(document) if block.number == number]
    return code_of(document, block, world)


def running_together(document, folders):
    how = TABLE[document]
    together = [n for n in sorted(how) if isinstance(how[n], Run) and how[n].by is None]
    return [(f"{document}/{number}", the_block(document, number, folders)) for number in together]


@pytest.mark.parametrize("document", sorted(TABLE))
def test_the_table_has_every_block(document):
    assert sorted(TABLE[document]) == [block.number for block in blocks_in(document)]
    assert {how.by for how in TABLE[document].values() if isinstance(how, Run)} <= {None, *globals()}


@pytest.mark.long
@pytest.mark.parametrize("document", ["000", "001", "003"])
def test_python_blocks_run(document, folders, tmp_path):
    run(running_together(document, folders), tmp_path)


@pytest.mark.long
def test_the_tutorial_runs(folders, tmp_path):
    pytest.importorskip("math_verify")
    (tmp_path / "grpo_math_finetune.py").write_text(the_block("002", 2, {**folders, "shm": tmp_path}))
    finished(["bash", "-euc", the_block("002", 3, folders)], tmp_path)
    run_folder = tmp_path / "EasyDeL-Checkpoints" / "GRPOTrainer"
    [line] = (run_folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
    assert (run_folder / "model" / "model.safetensors").exists()


@pytest.mark.long
@pytest.mark.parametrize(("script", "command"), [(0, 5), (15, 16)])
def test_the_command_starts_the_script(script, command, folders, tmp_path):
    (tmp_path / "train_grpo.py").write_text(the_block("003", script, folders))
    finished(["bash", "-euc", the_block("003", command, folders)], tmp_path)
    assert (tmp_path / "Qwen2-0.5B-GRPO" / "model" / "model.safetensors").exists()


@pytest.mark.long
def test_the_notebook_runs(folders, tmp_path, hub):
    pytest.importorskip("torch")  # the notebook imports it
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    own["HF_TOKEN"] = ""
    (tmp_path / "ds_zero2.json").write_text('{"zero_optimization": {"stage": 2}}')  # the notebook's reader has one
    out = run(running_together("004", folders), tmp_path, **own)
    assert "deepspeed: groupax needs no launcher" in out
    assert "trainable params" in out
    assert "Accuracy on GSM8K test split" in out
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(hub.repos["me/reasoning"])


def test_rows_and_variables(folders, tmp_path):
    row = the_block("001", 4, folders)
    assert {"prompt", "answer"} <= set(json.loads(re.sub(r"\s+#.*", "", row)))
    finished(["bash", "-euc", the_block("002", 1, folders)], tmp_path)
