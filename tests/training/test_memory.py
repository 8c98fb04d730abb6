"""Loading holds one copy of the weights, whatever the number of devices; limits of containers count."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from groupax.models.families import read_config
from groupax.models.specs import num_params, spec_leaves
from groupax.parallel import memory as peak
from groupax.parallel.mesh import make_mesh
from tests.conftest import TINY

GB = 10**9
LLAMA_8B = {**TINY, "vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
# In a process of its own, whose peak nothing else has part in.
LOAD = """
import resource, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from groupax import load_model
from groupax.parallel.mesh import make_mesh

model = load_model(sys.argv[1], mesh=make_mesh((1, -1, 1, 1, 1)))
q = model.params["layers"][0]["q"]
assert q.addressable_shards[0].data.shape == (4096, 512), q.sharding
print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def write_checkpoint(folder, hf, num_files=4):
    """Random bytes of a model in bfloat16, one file at a time; its size in bytes."""
    import ml_dtypes

    specs = list(spec_leaves(read_config(hf)))
    bits = np.random.default_rng(0).integers(0, 1 << 15, 1 << 20, dtype=np.uint16).view(ml_dtypes.bfloat16)
    weight_map = {}
    for number in range(num_files):
        name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = specs[number * len(specs) // num_files : (number + 1) * len(specs) // num_files]
        save_file({spec.name: np.resize(bits, spec.shape) for spec in part}, folder / name)
        weight_map |= dict.fromkeys((spec.name for spec in part), name)
    (folder / "config.json").write_text(json.dumps(hf))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return 2 * num_params(read_config(hf))


def layers_that_fit(folder):
    """Of the 8B shape, as many as disk and memory of this machine bear."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    allowed = min(0.72 * available, 0.8 * shutil.disk_usage(folder).free)
    sizes = {n: 2 * num_params(read_config({**LLAMA_8B, "num_hidden_layers": n})) for n in range(1, 33)}
    return max((n for n, size in sizes.items() if size <= allowed), default=0)


def write_group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_limits_of_control_groups_and_of_those_around_them(tmp_path):
    cgroups = "1:cpu:/\n0::/job/step\n"
    assert peak.container_free_bytes(cgroups, tmp_path) == float("inf"), "nothing is readable"
    write_group(tmp_path / "job/step", max="max\n", current="700\n", stat="anon 400\ninactive_file 200\n")
    assert peak.container_free_bytes(cgroups, tmp_path) == float("inf")
    write_group(tmp_path / "job", max="1000\n", current="800\n", stat="anon 400\ninactive_file 300\n")
    assert peak.container_free_bytes(cgroups, tmp_path) == 500
    write_group(tmp_path / "job/step", max="750\n")
    assert peak.container_free_bytes(cgroups, tmp_path) == 250
    write_group(tmp_path, max="900\n", current="950\n")
    assert peak.container_free_bytes(cgroups, tmp_path) == 0, "shown as its own root to a container"


def test_free_memory_is_within_the_limit_of_the_container(tmp_path, monkeypatch):
    cgroup = Path("/proc/self/cgroup")
    if not cgroup.is_file():
        pytest.skip("there are no control groups")
    write_group(tmp_path, max="8000\n", current="4000\n")
    write_group(tmp_path / "memory", limit_in_bytes="8000\n", usage_in_bytes="4000\n")
    monkeypatch.setattr(peak, "_CGROUPS", tmp_path)
    mesh = make_mesh()
    assert peak.free_memory_bytes(mesh) == 4000 / mesh.size


@pytest.mark.long
def test_loading_onto_eight_devices_needs_one_copy(tmp_path):
    num_layers = layers_that_fit(tmp_path)
    if num_layers < 4:
        pytest.skip("not enough memory or disk for four layers of the 8B shape")
    size = write_checkpoint(tmp_path, {**LLAMA_8B, "num_hidden_layers": num_layers})
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=True)
    peak = int(done.stdout)
    print(f"{num_layers} layers, {size / GB:.2f} GB: peak {peak / GB:.2f} GB")
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert peak < 1.3 * size, f"peak {peak / GB:.2f} GB for {num_layers} layers of {size / GB:.2f} GB"
