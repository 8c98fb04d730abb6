"""Scores of lm_eval through the server are those of its own backend on the same model."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from groupax import Engine, load_model
from groupax.data.tokenizer import load_tokenizer
from groupax.serve.app import Limits, create_app
from groupax.serve.loop import EngineLoop
from tests.conftest import SHARED

from .test_server import listening

pytest.importorskip("lm_eval", reason="lm_eval is not installed")
pytestmark = pytest.mark.long

MODEL = SHARED / "models" / "stories260K"
STARTS = (
    "Once upon a time, there was a little",
    "One day, a big",
    "Lily and her mom went to the",
    "Tom saw a red",
    "The dog was very",
)
CHOICES = (
    [" girl named Lily.", " zebra of steel.", " number seven."],
    [" dog", " tax", " bear"],
    [" park", " law", " moon"],
)
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_target: "{{{{start}}}}{{{{choices[0]}}}}"
doc_to_text: ""
"""
OWN = {
    "choose": """
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "continue": """
output_type: generate_until
doc_to_text: "{{start}}"
filter_list: [{name: none, filter: [{function: remove_whitespace}, {function: take_first}]}]
generation_kwargs: {until: ["."], max_gen_toks: 24, temperature: 0.0, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "perplex": """
output_type: loglikelihood_rolling
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
}


def evaluated(folder, model, arguments, batch):
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments]
    command += ["--tasks", "choose,continue,perplex", "--include_path", str(folder), "--log_samples"]
    command += ["--output_path", str(folder / model), "--batch_size", batch]
    subprocess.run(command, check=True, env={**os.environ, "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "EMPTY"})
    [results] = (folder / model).rglob("results_*.json")
    samples = {}
    for path in (folder / model).rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        samples[path.name.split("_")[1]] = sorted(lines, key=lambda line: line["doc_id"])
    return json.loads(results.read_text())["results"], samples


def test_lm_eval_scores_the_server_as_its_own_backend(tmp_path):
    if not MODEL.is_dir():
        pytest.skip(f"no {MODEL}")
    data = tmp_path / "rows.jsonl"
    rows = [{"start": start, "choices": CHOICES[index % 3]} for index, start in enumerate(STARTS * 4)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    for name, own in OWN.items():
        task = yaml.safe_load(TASK.format(name=name, data=data)) | yaml.safe_load(own)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task))
    own, own_samples = evaluated(
        tmp_path, "hf", f"pretrained={MODEL},dtype=float32,max_length=512,add_bos_token=False", "4"
    )
    model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
    loop = EngineLoop({"stories": Engine.of(model, tokenizer, kv_bytes=1 << 28)}).start()
    try:
        with listening(create_app(loop, Limits())) as address:
            arguments = (
                f"model=stories,base_url={address}/v1/completions,tokenizer_backend=huggingface,tokenizer={MODEL}"
            )
            served, samples = evaluated(
                tmp_path, "local-completions", f"{arguments},max_length=512,num_concurrent=4", "1"
            )
    finally:
        loop.close()
    for task, metrics in own.items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert served[task][metric] == pytest.approx(value, rel=1e-4), (task, metric)
    for task, lines in own_samples.items():
        for mine, line in zip(samples[task], lines, strict=True):
            first, second = mine["filtered_resps"], line["filtered_resps"]
            if task == "continue":
                assert first == second
            elif task == "choose":
                assert [float(logp) for logp, _ in first] == pytest.approx(
                    [float(logp) for logp, _ in second], abs=1e-3
                )
                assert [greedy for _, greedy in first] == [greedy for _, greedy in second]
