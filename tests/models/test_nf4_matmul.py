"""The kernel that multiplies by 4-bit matrices, and the memory that products with quantized matrices take on GPUs."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from groupax.models.kernels.nf4_matmul import MAX_ROWS, can_multiply, nf4_matmul_nt
from groupax.models.weights.nf4 import dequantize_nf4, quantize_nf4
from tests.conftest import rest_heavy

# Outputs and inputs: one block, a part of a tile, several scales of scales, blocks that do not fill the last step.
MATRICES = [(32, 64), (17, 128), (100, 192), (160, 832)]


def a_matrix(shape):
    numbers = np.random.default_rng(0).normal(size=shape) * np.linspace(0.1, 3.0, shape[0])[:, None]
    return quantize_nf4(jnp.asarray(numbers, jnp.float32))


def some_rows(num_rows, num_inputs, dtype):
    return jnp.asarray(np.random.default_rng(1).normal(size=(num_rows, num_inputs)), dtype)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", rest_heavy([16, 1, 130]))
@pytest.mark.parametrize(
    "shape", [MATRICES[0], *(pytest.param(each, marks=pytest.mark.heavy) for each in MATRICES[1:])], ids=str
)
def test_the_kernel_multiplies_by_the_dequantized_matrix(shape, num_rows, dtype):
    weight, x = a_matrix(shape), some_rows(num_rows, shape[1], dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(dequantize_nf4(weight, x.dtype), np.float64).T
    ours = np.asarray(nf4_matmul_nt(x, weight, interpret=True), np.float64)
    rounding = 2.0**-8 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(ours, exact, rtol=rounding, atol=rounding * np.abs(exact).max() / 10)


@pytest.mark.heavy
def test_many_rows_and_scales_across_rows_are_left_to_the_compiler():
    assert can_multiply(some_rows(MAX_ROWS, 64, "float32"), a_matrix((4, 64)))
    assert not can_multiply(some_rows(MAX_ROWS + 1, 64, "float32"), a_matrix((4, 64)))
    assert not can_multiply(some_rows(1, 96, "float32"), a_matrix((4, 96)))


COMPILED = """
import sys
from functools import partial
from pathlib import Path
from groupax.planning.devices import find_target, prepare
prepare(sys.argv[1], cuda=Path(sys.argv[2]))
import jax
import jax.numpy as jnp
from groupax.models.layers import linear
from groupax.models.weights.quantize import quantizer

mesh = jax.sharding.Mesh(find_target(sys.argv[1]).devices[:1], "x")
replicated = jax.sharding.PartitionSpec()
shape = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.NamedSharding(mesh, replicated))
for kind, rows, dtype in (
    ("nf4", 256, jnp.bfloat16),
    ("nf4", 64, jnp.float32),
    ("int8", 64, jnp.bfloat16),
    ("float8", 64, jnp.bfloat16),
    ("nf4", 1024, jnp.bfloat16),
):
    weight = jax.eval_shape(quantizer(kind), jax.ShapeDtypeStruct((4864, 896), jnp.float32))
    weight = jax.tree.map(lambda x: shape(x.shape, x.dtype), weight)
    specs = {"mesh": mesh, "in_specs": replicated, "out_specs": replicated, "check_vma": False}
    compiled = jax.jit(jax.shard_map(linear, **specs)).lower(shape((rows, 896), dtype), weight).compile()
    print(compiled.memory_analysis().temp_size_in_bytes >= 4864 * 896)
"""


@pytest.mark.heavy
@pytest.mark.skipif(not find_spec("qwix"), reason="needs qwix")
@pytest.mark.parametrize(("target", "casts_float8_in_memory"), [("h100-1", False), ("rtx4090-1", True)])
def test_a_product_with_few_rows_writes_no_matrix_to_memory(target, casts_float8_in_memory):
    cuda = Path(__file__).parents[2] / "build" / "cuda"
    if not (cuda / "jax_plugins").is_dir():
        pytest.skip("jax's CUDA plugin is not in build/cuda; `groupax plan` says how to get it")
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-c", COMPILED, target, str(cuda)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["False"] * 3 + [str(casts_float8_in_memory), "True"]
