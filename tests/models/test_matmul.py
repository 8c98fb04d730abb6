"""Products of factors of fewer bits and of grouped matrices, norms, and the memory that programs take."""

import os
import subprocess
import sys
import textwrap
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax.models import experts
from groupax.models.config import ClampedSwiglu, NormKind
from groupax.models.experts import loop_over_experts, ragged_experts
from groupax.models.kernels.triton_matmul import grouped_matmul
from groupax.models.layers import norm
from groupax.models.matmul import cpu_multiplies_bfloat16, matmul, matmul_nt
from tests.conftest import assert_trees_match, rest_heavy


def factors(*shapes, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.fixture(params=[False, True], ids=["as_float32", "as_bfloat16"])
def kind_of_cpu(request, monkeypatch):
    """A CPU without and one with matrix units for bfloat16; the latter only where it is one."""
    if request.param and not cpu_multiplies_bfloat16():
        pytest.skip("this CPU has no matrix units for bfloat16")
    monkeypatch.setattr("groupax.models.matmul.cpu_multiplies_bfloat16", lambda: request.param)


@pytest.mark.drawn(6)
@pytest.mark.optimized
@pytest.mark.parametrize("batch", [(), (3, 2)])
@pytest.mark.parametrize(("M", "K", "N"), rest_heavy([(2, 7, 5), (1, 1, 1), (16, 64, 33), (130, 24, 96)]))
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_bfloat16_add_up_in_float32(kind_of_cpu, batch, M, K, N, transposed):
    x, y = factors((*batch, M, K), (*batch, N, K) if transposed else (*batch, K, N))
    multiply = matmul_nt if transposed else matmul

    def loss(x, y, multiply):
        return jnp.sum(jnp.sin(multiply(x, y)))

    def exact(x, y):
        return x.astype(jnp.float32) @ (y.swapaxes(-1, -2) if transposed else y).astype(jnp.float32)

    product = jax.jit(multiply)(x, y)
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, exact(x, y), rtol=1e-5, atol=1e-4)
    grads = jax.jit(jax.grad(lambda x, y: loss(x, y, multiply), (0, 1)))(x, y)
    expected = jax.grad(lambda x, y: loss(x, y, exact), (0, 1))(x, y)
    for grad, wanted in zip(grads, expected, strict=True):
        assert grad.dtype == jnp.bfloat16
        scale = float(jnp.max(jnp.abs(wanted.astype(jnp.float32)))) + 1e-6
        np.testing.assert_allclose(
            np.asarray(grad, np.float32) / scale, np.asarray(wanted, np.float32) / scale, atol=0.02
        )


@pytest.mark.optimized
@pytest.mark.heavy
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the page faults of Linux")
@pytest.mark.parametrize("chosen", [False, True])
def test_a_programs_memory_is_used_again_unless_the_environment_says_otherwise(chosen):
    program = """
        import resource
        from groupax.parallel.runtime import configure_jax
        configure_jax()
        import jax, jax.numpy as jnp

        @jax.jit
        def large(x):
            return jnp.sum((x @ x.T)[::7])

        x = jnp.ones((4096, 8))
        num_new = 0
        for _ in range(40):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            large(x).block_until_ready()
            num_new += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > 10_000
        print(num_new)
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environment |= {"MALLOC_TOP_PAD_": "0"} if chosen else {}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    num_new = int(run.stdout.split()[-1])  # of 40 times; some, until the pieces are where they fit again
    assert num_new > 35 if chosen else num_new < 20


# -- of rows with the matrices of their groups: pallas emulates the kernels for GPUs on this CPU

MANY = np.bincount(np.random.default_rng(0).integers(0, 128, 150), minlength=128)
# rows, their dims, the matrices' other dims, sizes of the groups
CASES = {
    "ragged, empty, rows after the last": (300, 48, 150, [0, 151, 0, 140, 0]),
    "whole tiles": (64, 64, 16, [16, 32, 16]),
    "one group": (33, 130, 40, [33]),
    "all empty": (20, 16, 16, [0, 0]),
    "many": (150, 20, 36, MANY),
}


def emulate_kernels(monkeypatch):
    """Lets mixtures of experts be traced as for a GPU, with emulated kernels."""
    monkeypatch.setattr(experts, "traced_platform", lambda: "gpu")
    monkeypatch.setattr(experts, "_grouped_matmul", lambda *arrays: grouped_matmul(*arrays, True))


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", rest_heavy(list(CASES)))
def test_the_kernels_multiply_each_row_by_its_groups_matrix_in_both_directions(case, dtype):
    num_rows, num_in, num_out, sizes = CASES[case]
    rng = np.random.default_rng(0)
    rows, weights, cotangent = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((num_rows, num_in), (len(sizes), num_out, num_in), (num_rows, num_out))
    )
    out, pull_back = jax.vjp(lambda *of: grouped_matmul(*of, jnp.asarray(sizes), True), rows, weights)
    d_rows, d_weights = pull_back(cotangent)
    assert {each.dtype for each in (out, d_rows, d_weights)} == {jnp.dtype(dtype)}

    expected = [np.zeros(each.shape) for each in (out, rows, weights)]
    x, w, g = (np.asarray(each, np.float64) for each in (rows, weights, cotangent))
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        expected[0][start:end] = x[start:end] @ w[group].T
        expected[1][start:end] = g[start:end] @ w[group]
        expected[2][group] = g[start:end].T @ x[start:end]
    # sums are in float32 and rounded once
    rounding = 2.0**-8 if dtype == "bfloat16" else 0.0
    for ours, exact in zip((out, d_rows, d_weights), expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64), exact, rtol=rounding, atol=1e-4)


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("biased", "weighs_inputs", "remote"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_all_ways_through_the_experts_are_the_sum_over_them(monkeypatch, biased, weighs_inputs, remote):
    """Some choices are experts of other devices, which contribute nothing here."""
    rng = np.random.default_rng(0)
    shapes = (40, 16), (40, 3), (5, 24, 16), (5, 24, 16), (5, 16, 24)
    x, weights, gate, up, down = (jnp.asarray(rng.normal(size=shape) / 4, jnp.float32) for shape in shapes)
    biases = tuple(jnp.asarray(rng.normal(size=(5, 24)), jnp.float32) if biased else None for _ in range(2))
    chosen = jnp.asarray(np.argsort(rng.random((40, 9 if remote else 5)))[:, :3] - 2 * remote, jnp.int32)
    activation = ClampedSwiglu(1.3, 2.0) if biased else "silu"

    def expert(x, w, e):
        x, w = (w * x, 1.0) if weighs_inputs else (x, w)
        gated, upper = x @ gate[e].T, x @ up[e].T
        if not biased:
            return w * (jax.nn.silu(gated) * upper) @ down[e].T
        gated, upper = jnp.minimum(gated + biases[0][e], 2.0), jnp.clip(upper + biases[1][e], -2.0, 2.0)
        return w * ((upper + 1.0) * gated * jax.nn.sigmoid(1.3 * gated)) @ down[e].T

    def through(way, **options):
        def loss(x, weights, matrices, biases):
            out = way(x, weights, chosen, matrices, biases, activation, weighs_inputs, **options)
            return jnp.sum(jnp.square(out)), out

        return jax.value_and_grad(loss, range(4), has_aux=True)(x, weights, (gate, up, down), biases)

    looped, sorted_by_expert = through(loop_over_experts), through(ragged_experts, has_remote=remote)
    rows = zip(x, weights, np.asarray(chosen), strict=True)
    own = [[(row, w, e) for w, e in zip(ws, es, strict=True) if 0 <= e < 5] for row, ws, es in rows]
    expected = [sum((expert(*each) for each in those), jnp.zeros(16)) for those in own]
    np.testing.assert_allclose(looped[0][1], expected, atol=1e-4)
    assert_trees_match(sorted_by_expert, looped, rtol=1e-3, atol=1e-4)
    emulate_kernels(monkeypatch)
    assert_trees_match(through(ragged_experts, has_remote=remote), looped, rtol=1e-3, atol=1e-4)


# -- norms


EPS = 1e-5
# shapes of x and of a weight: tokens, heads that share a weight, heads that each have one
SHAPES = {"tokens": ((6, 40), (40,)), "head": ((6, 4, 16), (16,)), "each_head": ((6, 4, 16), (4, 16))}


def plain_norm(kind, x, weight):
    """Computes a norm by its definition, in the dtype of its inputs."""
    x = x - x.mean(-1, keepdims=True) if kind.endswith("layer") else x
    factor = 1 + weight if kind.startswith("zero_centered") else weight
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS) * jnp.broadcast_to(factor, x.shape)


def inputs(shapes, dtype):
    rng = np.random.default_rng(0)
    of_x, of_weight = shapes
    x, cotangent = (rng.normal(0.3, 1.5, of_x) for _ in range(2))
    return tuple(jnp.asarray(each, dtype) for each in (x, rng.normal(1, 0.5, of_weight), cotangent))


def value_and_gradients(norm, x, weight, cotangent):
    y, backward = jax.vjp(norm, x, weight)
    return (y, *backward(cotangent))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", get_args(NormKind))
def test_norms_and_their_gradients_follow_their_formulas_in_float64(kind, shape, dtype):
    given = inputs(SHAPES[shape], dtype)
    ours = jax.jit(lambda *given: value_and_gradients(lambda x, weight: norm(x, weight, EPS, kind), *given))(*given)
    assert [each.dtype for each in ours] == [dtype] * 3
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(each, np.float64)) for each in given)
        exact = value_and_gradients(lambda x, weight: plain_norm(kind, x, weight), *wide)
        exact = [np.asarray(each) for each in exact]
    tolerance = 2e-6 if dtype == jnp.float32 else 0.01
    for own, true in zip(ours, exact, strict=True):
        np.testing.assert_allclose(
            np.asarray(own, np.float64), true, rtol=tolerance, atol=tolerance * np.abs(true).max()
        )
