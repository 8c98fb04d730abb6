"""The documents that users hold in their hands run."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import SHARED
from .seed_documents import TABLE, WITH_SERVER, Not, blocks_of, code_of, replaced
from .test_export import hub as hub  # a fixture

DOCUMENTS = sorted((SHARED / "seeds").glob("*.txt"))
pytestmark = pytest.mark.skipif(not DOCUMENTS, reason=f"no documents in {SHARED / 'seeds'}")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
RUNNER = """
import doctest, json, sys, time
blocks, sys.argv = json.load(open(sys.argv[1])), ["train_grpo.py", *sys.argv[2:]]
names = {"__name__": "__main__"}
for name, code in blocks:
    started = time.time()
    if ">>>" in code:
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
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    rows = [
        {
            "question": f"Tim has {n} apples and eats {n % 3}. How many are left?",
            "answer": f"{n} - {n % 3}\n#### {n - n % 3}",
        }
        for n in range(10, 42)
    ]
    numina = [
        {
            "problem": row["question"],
            "solution": rf"It is $\boxed{{{index}}}$.",
            "messages": [{"role": "user", "content": "?"}],
        }
        for index, row in enumerate(rows[:4])
    ]
    prompts = [
        {"prompt": row["question"], "completion": "none", "reference": "left", "answer": row["answer"]} for row in rows
    ]
    datasets = {"prompts": prompts[:8], "gsm8k": prompts, "gsm8k_raw": rows, "numina": numina}
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


def run(blocks, tmp_path, *flags, **environment):
    """Run blocks in a process of their own, in one namespace and with these flags; returns what they print."""
    (tmp_path / "blocks.json").write_text(json.dumps(blocks))
    (tmp_path / "runner.py").write_text(RUNNER)
    own = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", **environment}
    argv = [sys.executable, str(tmp_path / "runner.py"), str(tmp_path / "blocks.json"), *flags]
    done = subprocess.run(argv, cwd=tmp_path, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    print(*re.findall(r"^ran .*$", done.stdout, re.MULTILINE), sep="\n")
    assert [f"ran {name} in" in done.stdout for name, _ in blocks] == [True] * len(blocks)
    return done.stdout + done.stderr


def running(document, folders, languages=("python", "cell")):
    coded = [(f"{document}/{block.number}", code_of(document, block, folders), block) for block in blocks_in(document)]
    return [(name, code) for name, code, block in coded if code is not None and block.language in languages]


@pytest.mark.parametrize("document", sorted(TABLE))
def test_the_table_has_every_block(document):
    assert sorted(TABLE[document]) == [block.number for block in blocks_in(document)]


@pytest.mark.long
@pytest.mark.parametrize("document", ["000", "001", "003"])
def test_python_blocks_run(document, folders, tmp_path):
    run(running(document, folders), tmp_path)


@pytest.mark.long
def test_the_tutorial_runs_on_ray(folders, tmp_path):
    """On a cluster that Ray starts for it: one machine, whose chips are only said to be there."""
    pytest.importorskip("math_verify")
    pytest.importorskip("ray")
    [script, command] = [block for block in blocks_in("002") if block.number in (2, 3)]
    code = code_of("002", script, folders).replace("{shm}", str(tmp_path))
    (tmp_path / "grpo_math_finetune.py").write_text(code)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "RAY_OVERRIDE_RESOURCES": '{"TPU": 4}',
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(["bash", "-euc", command.text], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "(host 0 " in done.stdout + done.stderr
    run_folder = tmp_path / "EasyDeL-Checkpoints" / "GRPOTrainer"
    [line] = (run_folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
    assert (run_folder / "model" / "model.safetensors").exists()


@pytest.mark.long
def test_the_script_samples_on_a_server(folders, tmp_path):
    [block] = [block for block in blocks_in("003") if block.number == 8]
    command = [sys.executable, "-m", "groupax", "serve", "--model", str(folders["model"]), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "GROUPAX_API_KEY": "key"}
    ) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip().rpartition(":")[2].split("/")[0]
            own = TABLE["003"][8].replace | {old: new.replace("{port}", port) for old, new in WITH_SERVER.items()}
            code = replaced(block.text, own, folders)
            out = run([("003/8", code)], tmp_path, "--vllm_server_host", "ip-127-0-0-1", GROUPAX_API_KEY="key")
            assert f"sampled by the server at http://127.0.0.1:{port}" in out
        finally:
            server.kill()


@pytest.mark.long
def test_the_notebook_runs(folders, tmp_path, hub):
    pytest.importorskip("torch")  # the notebook imports it
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "right",
    }
    out = run(running("004", folders), tmp_path, **environment)
    assert "trainable params" in out
    assert "Accuracy on GSM8K test split" in out
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(hub.repos["me/reasoning"])


@pytest.mark.parametrize("document", ["001", "002"])
def test_data_and_shell_blocks(document, tmp_path):
    for block in blocks_in(document):
        if isinstance(TABLE[document][block.number], Not):
            continue
        if block.language == "json":
            assert {"prompt", "answer"} <= set(json.loads(re.sub(r"\s+#.*", "", block.text)))
        if block.language == "bash":
            assert subprocess.run(["bash", "-euc", block.text], cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("document", "number", "reason"),
    [
        (document, number, how.reason)
        for document, table in TABLE.items()
        for number, how in table.items()
        if isinstance(how, Not)
    ],
)
def test_blocks_that_do_not_run_here(document, number, reason):
    pytest.skip(f"{document}, block {number}: {reason}")
