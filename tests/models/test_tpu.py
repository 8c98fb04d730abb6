"""`groupax plan` compiles an engine's and a learner's programs for TPUs on a machine that has none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY

LIBTPU = Path(__file__).parents[2] / "build" / "libtpu"
# A layer of Qwen2.5-0.5B and its vocabulary: widths decide what compiles, layers only how long that takes.
ONE_LAYER = {**TINY, "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864}
ONE_LAYER |= {"num_hidden_layers": 1, "num_attention_heads": 14, "max_position_embeddings": 32_768}

pytestmark = [
    pytest.mark.parity,
    pytest.mark.optimized,
    pytest.mark.skipif(not LIBTPU.is_dir(), reason="no libtpu in build/libtpu; `make parity` puts it there"),
]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ONE_LAYER))
    return str(path)


def test_a_runs_programs_compile_for_a_tpu(model, tmp_path):
    out = tmp_path / "plan.json"
    command = [sys.executable, "-m", "groupax", "plan", "--model", model, "--devices", "v5e-4", "--libtpu", str(LIBTPU)]
    lengths = "--max_prompt_length 512 --max_completion_length 1024 --prompts_per_step 32 --num_generations 8"
    told = "--micro_batch_tokens 2048 --json"
    done = subprocess.run(
        [*command, *lengths.split(), *told.split(), str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("fits: the peak is ")
    lines = done.stderr.splitlines()
    assert all(line.endswith(" ...") or "compiled in" in line for line in lines), "libtpu and jax do not complain"
    [record] = json.loads(out.read_text())
    programs = {program["name"]: program for program in record["programs"]}
    assert list(programs) == ["admit", "decode_chunk", "micro_step", "all_reduce", "apply_update"]
    memory = programs["decode_chunk"]["memory"]
    num_weights = 151_936 * 896 + 896 * (2 * 896 + 2 * 128 + 3 * 4864) + 896 + 2 * 128 + 3 * 896
    assert memory["policy"] == 2 * num_weights
    assert memory["masters"] == 4 * num_weights
    # on each chip 64 rows of 1,024 tokens and 8 prompts of 512, each of 512 bytes and its id, and the prompts' lengths
    assert memory["kv cache"] == (64 * 1024 + 8 * 512) * (512 + 4) + 8 * 4
    assert memory["temporary"] < 0.3e9, "the cache is updated in place"
    assert programs["admit"]["memory"]["temporary"] < 0.5e9
    assert programs["all_reduce"]["exchanged"]["all-reduce"] == pytest.approx(2 * 4 * num_weights * 3 / 4, rel=1e-3)
    for program in programs.values():
        assert program["total"] < 15.75 * 2**30
        assert max(program["seconds"].values()) > 0
