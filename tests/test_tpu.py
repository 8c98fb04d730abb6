"""The engine's programs compile for TPUs, ahead of time, on a machine that has none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBTPU = ROOT / "build" / "libtpu"


@pytest.mark.parity
@pytest.mark.skipif(not LIBTPU.is_dir(), reason="no libtpu in build/libtpu; `make parity` puts it there")
def test_the_engine_compiles_for_a_tpu():
    command = [sys.executable, str(ROOT / "dev" / "compile_for_tpu.py"), str(LIBTPU), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = {row["program"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(rows) == {"admit", "decode_chunk"}
    # bfloat16 weights, 0.99 GB, and a cache of 64 x 1,024 + 8 x 512 tokens of 12 kB on each chip
    assert rows["decode_chunk"]["arguments_gb"] == pytest.approx(0.988 + 0.856, abs=0.01)
    assert rows["decode_chunk"]["temporaries_gb"] < 0.3, "the cache is updated in place"
    assert rows["admit"]["temporaries_gb"] < 0.5
