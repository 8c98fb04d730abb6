"""Flags of XLA for NVIDIA GPUs: what is set, and what they change in a program that is compiled for absent ones."""

import os
import subprocess
import sys

import pytest

from groupax.parallel import accelerators as xla_flags
from groupax.parallel.accelerators import GPU_FLAGS, set_gpu_flags
from tests.models.test_gpu_targets import CUDA, needs_cuda


def test_flags_of_the_user_are_kept(monkeypatch):
    name, value = next(iter(GPU_FLAGS.items()))
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=7 --xla_dump_to=somewhere")
    set_gpu_flags()
    flags = dict(flag.removeprefix("--").split("=") for flag in os.environ["XLA_FLAGS"].split())
    assert flags == {**GPU_FLAGS, name: "7", "xla_dump_to": "somewhere"}
    assert value != "7"
    set_gpu_flags()
    assert len(os.environ["XLA_FLAGS"].split()) == len(flags)


@pytest.mark.parametrize(("flags", "jaxlib"), [("flags.txt", "0.10.2"), ("", "0.11.0")])
def test_files_of_flags_and_unknown_versions_are_left_alone(monkeypatch, flags, jaxlib):
    monkeypatch.setattr(xla_flags.version, "__version__", jaxlib)
    monkeypatch.setenv("XLA_FLAGS", flags)
    set_gpu_flags()
    assert os.environ["XLA_FLAGS"] == flags


def test_the_installed_jaxlib_knows_the_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    set_gpu_flags()
    subprocess.run([sys.executable, "-c", "import jax; jax.numpy.ones(3)"], check=True, env=os.environ)


UPDATE = """
import sys
from pathlib import Path
from groupax.planning.devices import find_target, prepare
prepare("h100-8", cuda=Path(sys.argv[1]))
import jax, jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from groupax.models.execution import apply_layers
from groupax.parallel.collectives import all_gather
mesh = Mesh(np.array(find_target("h100-8").devices), ("fsdp",))

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
def test_a_layers_gradients_are_scattered_at_once(monkeypatch, flags, in_loops):
    monkeypatch.setenv("XLA_FLAGS", flags)
    command = [sys.executable, "-c", UPDATE, str(CUDA)]
    done = subprocess.run(command, check=False, env=os.environ, capture_output=True, text=True)
    assert done.stdout == f"{in_loops}\n", done.stderr
