"""NVIDIA GPUs to compile for, which may be absent: their figures, and programs that are compiled for them."""

import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from groupax.parallel.accelerators import GPU_FLAGS, GPU_MEMORY_FRAC, GPUS, GpuHosts, chip_of, gpu_hosts
from groupax.parallel.runtime import _use_most_of_a_gpu
from groupax.satellites.planning.devices import prepare, target_config

CUDA = Path(__file__).parents[2] / "build" / "cuda"
needs_cuda = pytest.mark.skipif(
    not (CUDA / "jax_plugins").is_dir(),
    reason="jax's CUDA plugin is not in build/cuda; `groupax plan` says how to get it",
)


def test_every_gpu_has_a_target_with_its_figures():
    folder = files("groupax.satellites.planning").joinpath("gpu_targets")
    assert {path.name.removesuffix(".txtpb") for path in folder.iterdir()} == {
        gpu.architecture for gpu in GPUS.values()
    }
    for gpu in GPUS.values():
        text = target_config(gpu)
        found = {name: float(value) for name, value in re.findall(r"^  (\w+): ([\d.]+)$", text, re.MULTILINE)}
        assert gpu.memory_bytes == pytest.approx(GPU_MEMORY_FRAC * found["device_memory_size"])
        assert gpu.memory_bytes_per_s == found["memory_bandwidth"]
        assert (gpu.num_cores, gpu.clock_ghz) == (found["core_count"], found["clock_rate_ghz"])
        assert text.count(f'"{gpu.kinds[0]}"') == 2
        assert chip_of(gpu.kinds[0]) is gpu


def test_names_of_gpus():
    assert gpu_hosts("H100-3 ") == GpuHosts("h100-3", GPUS["h100"], 1, 3)
    assert gpu_hosts("a100-40g-8") == GpuHosts("a100-40g-8", GPUS["a100-40g"], 1, 8)
    assert gpu_hosts("h100-64") == GpuHosts("h100-64", GPUS["h100"], 8, 8)
    own = gpu_hosts("custom:24GB,1008GB/s,165TF-2").chip
    assert (own.device_bytes, own.memory_bytes_per_s, own.flops) == (24e9, 1008e9, 165e12)
    assert (own.architecture, own.num_cores) == ("sm89", GPUS["rtx4090"].num_cores)
    assert chip_of("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert chip_of("NVIDIA L40") is None  # neither an L4 nor an L40S


def test_a_missing_plugin_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("groupax.satellites.planning.devices.has_cuda_plugin", lambda: False)
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(
        ValueError, match=rf"none in {tmp_path}; get it with pip install 'groupax\[cuda13\]', or .* --target"
    ):
        prepare("h100-8", cuda=tmp_path)


def test_programs_may_have_most_of_a_gpus_memory(monkeypatch):
    monkeypatch.setattr("os.environ", {})
    _use_most_of_a_gpu()
    assert os.environ == {"XLA_CLIENT_MEM_FRACTION": str(GPU_MEMORY_FRAC)}
    os.environ.clear()
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.5"
    _use_most_of_a_gpu()
    assert os.environ == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "the user's choice"


BEGIN = """
import sys
from functools import partial
from pathlib import Path
from groupax.satellites.planning.devices import find_target, prepare
prepare(sys.argv[1], cuda=Path(sys.argv[2]))
import jax
import jax.numpy as jnp
"""
FOUND = """
target = find_target(sys.argv[1])
first, last = target.devices[0], target.devices[-1]
print(len(target.devices), first.platform, first.device_kind, last.process_index, jax.default_backend(), sep=";")
"""


def printed(script, target, *arguments, flags=None):
    """What a program prints that compiles for absent GPUs, which no setting of this process reaches."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment |= {} if flags is None else {"XLA_FLAGS": flags}
    command = [sys.executable, "-c", BEGIN + script, target, str(CUDA), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@needs_cuda
@pytest.mark.heavy
@pytest.mark.parametrize("kind", GPUS)
def test_absent_gpus_come_up_on_a_machine_without_any(kind):
    name = f"{kind}-16" if GPUS[kind].network_bytes_per_s else f"{kind}-8"
    out, err = printed(FOUND, name)
    number, platform, device_kind, last_host, default = out.split(";")
    assert (int(number), platform, default) == (int(name.rpartition("-")[2]), "gpu", "cpu")
    assert device_kind.startswith(GPUS[kind].kinds)
    assert int(last_host) == int(number) // 8 - 1
    assert err == "", "the plugin has nothing to complain about"


# -- programs that are compiled for them


ATTENTION = """
from groupax.models.kernels import triton_attention
from groupax.models.config import AttentionConfig
from groupax.models.attention import LayerCache, Past

device = find_target(sys.argv[1]).devices[0]
shape = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device))
# rows, prompts, query heads, key heads, dims, columns of rows, dtype, dtype of the cache, settings
for B, Q, N, K, H, T, dtype, kv_dtype, settings in (
    (64, 8, 14, 2, 64, 1024, "bfloat16", "bfloat16", {}),
    (64, 2, 8, 4, 256, 4096, "float32", "float32", {"softcap": 50.0, "window": 400}),
    (64, 64, 32, 8, 80, 1000, "bfloat16", "float32", {}),
    (64, 8, 32, 8, 128, 1024, "bfloat16", sys.argv[3], {}),
):
    S = 512
    cache = [shape(each, kv_dtype) for each in ((Q, K, H, S), (Q, K, S, H), (B, K, H, T), (B, K, T, H))]
    past = Past(shape((Q,), jnp.int32), shape((B,), jnp.int32))
    new = [shape((B, heads, H), dtype) for heads in (N, K, K)]
    attend = jax.jit(partial(triton_attention.attend_past, AttentionConfig(0.1, **settings)), donate_argnums=1)
    memory = attend.lower(past, LayerCache(*cache), *new).compile().memory_analysis()
    print(memory.alias_size_in_bytes == sum(x.size * x.dtype.itemsize for x in cache))
"""


@needs_cuda
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("target", "kv_dtype"),
    [
        ("h100-1", "float8_e4m3fn"),
        pytest.param("a100-1", "float32", marks=pytest.mark.long),
        pytest.param("rtx4090-1", "float8_e4m3fn", marks=pytest.mark.long),
    ],
)
def test_the_kernels_of_decoding_compile_and_update_the_cache_in_place(target, kv_dtype):
    assert printed(ATTENTION, target, kv_dtype)[0].split() == ["True"] * 4


UPDATE = """
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from groupax.models.execution import apply_layers
from groupax.parallel.collectives import all_gather
mesh = Mesh(np.array(find_target(sys.argv[1]).devices), ("fsdp",))

def loss(x, layers):
    @jax.checkpoint
    def layer(x, weights, index):
        up, down = (all_gather(weight, "fsdp", 1) for weight in weights)
        return jnp.tanh(x @ up) @ down, None

    return jnp.sum(apply_layers(layer, x, layers, [0] * len(layers))[0].astype(jnp.float32))

sharded = PartitionSpec(None, "fsdp")
step = jax.shard_map(
    lambda x, layers: jax.value_and_grad(loss, argnums=1)(x, layers)[1],
    mesh=mesh, in_specs=(PartitionSpec("fsdp"), sharded), out_specs=sharded, check_vma=False,
)
weights = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, sharded))
x = jax.ShapeDtypeStruct((65536, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
text = jax.jit(step).lower(x, [(weights, weights)] * 6).compile().as_text()
loops = [body for body in text.split("\\n\\n") if body.startswith("%") and f"body={body.split()[0]}" in text]
print(sorted(body.count("reduce-scatter-start(") for body in loops))
"""


@needs_cuda
@pytest.mark.heavy
@pytest.mark.parametrize(("flags", "in_loops"), [("", [0, 1]), (f"--{next(iter(GPU_FLAGS))}=0", [0, 2])])
def test_a_layers_gradients_are_scattered_at_once(flags, in_loops):
    assert printed(UPDATE, "h100-8", flags=flags)[0] == str(in_loops)
