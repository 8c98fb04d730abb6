"""The kernel that multiplies by 4-bit matrices, and the memory that products with quantized matrices take on GPUs."""

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
