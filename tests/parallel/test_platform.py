"""Programs are traced for the mesh's platform; what is recorded of processors, and the flags of XLA for GPUs."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec

from groupax.models import matmul
from groupax.models.decoder import causal_hidden, head_weights
from groupax.models.families import read_config
from groupax.models.logprobs import token_logprobs
from groupax.models.specs import model_specs
from groupax.parallel import accelerators
from groupax.parallel.accelerators import GPU_FLAGS, has_cuda_plugin, set_gpu_flags
from groupax.parallel.mesh import AXES
from tests.conftest import TINY

DEVICES = {
    "tpu": AbstractDevice("TPU v5 lite", 1, "tpu"),
    "gpu": AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu"),
    "cpu": AbstractDevice("cpu", None, "cpu"),
}


def mesh_of(platform):
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    return AbstractMesh((1,) * len(AXES), AXES, kinds, abstract_device=DEVICES[platform])


def products_in(jaxpr):
    """The factors of every matrix product of a program, and of those that it calls."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append([factor.aval for factor in equation.invars])
        for inner in jaxprs_in_params(equation.params):
            found += products_in(inner)
    return found


def traced(platform):
    """A forward and backward pass of a bfloat16 model, traced for one device of a platform."""
    config = read_config({**TINY, "model_type": "qwen2"})
    whole = PartitionSpec()

    def gradients(params, tokens):
        def loss(params):
            hidden = causal_hidden(config, params, tokens, jnp.zeros(2, jnp.int32)).reshape(-1, 32)
            return jnp.sum(token_logprobs(hidden, head_weights(params), tokens.reshape(-1), 1.0)[0])

        return jax.grad(loss)(params)

    shapes = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16), model_specs(config))
    program = jax.shard_map(gradients, mesh=mesh_of(platform), in_specs=whole, out_specs=whole, check_vma=False)
    return jax.make_jaxpr(program)(shapes, jax.ShapeDtypeStruct((2, 8), jnp.int32)).jaxpr


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("planner_multiplies_bfloat16", [False, True])
def test_accelerators_multiply_bfloat16_weights_as_they_are(platform, planner_multiplies_bfloat16, monkeypatch):
    monkeypatch.setattr(matmul, "cpu_multiplies_bfloat16", lambda: planner_multiplies_bfloat16)
    found = products_in(traced(platform))
    wide = [factors for factors in found if any(factor.dtype != jnp.bfloat16 for factor in factors)]
    of_positions = {(4, 8), (16, 4)}  # the angles of 16 positions, for both dims of 4 pairs
    assert all({factor.shape for factor in factors} == of_positions for factors in wide)
    assert len(found) - len(wide) > 20


def test_a_cpu_without_matrix_units_multiplies_float32(monkeypatch):
    monkeypatch.setattr(matmul, "cpu_multiplies_bfloat16", lambda: False)
    assert all(factor.dtype == jnp.float32 for factors in products_in(traced("cpu")) for factor in factors)


# -- the processor and its flags

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu sse4_2 avx avx2 avx512f avx512_vnni amx_tile
"""


def test_a_processor_has_its_name(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text(XEON)
    monkeypatch.setattr(accelerators, "CPUINFO", path)
    assert accelerators.processor_name() == "Intel(R) Xeon(R) Processor"


def test_a_machine_without_cpuinfo_has_its_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerators, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(accelerators.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(accelerators.platform, "processor", lambda: "")
    assert accelerators.processor_name() == "aarch64"


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
    monkeypatch.setattr(accelerators.version, "__version__", jaxlib)
    monkeypatch.setenv("XLA_FLAGS", flags)
    set_gpu_flags()
    assert os.environ["XLA_FLAGS"] == flags


def test_a_platform_without_devices_is_an_error_that_says_what_to_install():
    if has_cuda_plugin():
        pytest.skip("jax's CUDA plugin is installed")
    code = "from groupax.parallel.runtime import configure_jax; configure_jax()"
    command, environment = [sys.executable, "-c", code], {**os.environ, "JAX_PLATFORMS": "cuda"}
    err = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr
    assert "RunError: JAX_PLATFORMS is 'cuda' (unset it to use the devices that there are), and jax cannot start" in err
    assert err.rstrip().endswith("; for cuda: pip install 'groupax[cuda13]'")


def test_the_installed_jaxlib_knows_the_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    set_gpu_flags()
    subprocess.run([sys.executable, "-c", "import jax; jax.numpy.ones(3)"], check=True, env=os.environ)


def test_large_blocks_of_memory_are_used_again():
    program = (
        "import resource, numpy as np; from groupax.parallel import memory\n"
        "memory.entry_points = lambda group: (); memory.find_spec = lambda _: None; memory.keep_freed_memory()\n"
        "for _ in range(3): before = resource.getrusage(0).ru_minflt; x = np.ones(5 << 28, np.uint8); del x\n"
        "print(resource.getrusage(0).ru_minflt - before)"
    )
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name and "GLIBC" not in name}
    assert int(subprocess.check_output([sys.executable, "-c", program], env=environment)) < 100
