"""Products of rows with the matrices of their groups: pallas emulates the kernels for GPUs on this CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax import init_model
from groupax.models import experts
from groupax.models.decoder import logits
from groupax.models.experts import loop_over_experts, ragged_experts
from groupax.models.kernels.grouped_matmul import grouped_matmul
from tests.conftest import TINY, rest_heavy

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


@pytest.mark.drawn(3, "fused")
@pytest.mark.heavy
def test_experts_of_other_devices_contribute_nothing_through_the_kernels(monkeypatch):
    rng = np.random.default_rng(0)
    x, weights, *matrices = (
        jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
        for shape in ((40, 16), (40, 3), (4, 24, 16), (4, 24, 16), (4, 16, 24))
    )
    chosen = jnp.asarray(np.argsort(rng.random((40, 12)))[:, :3] - 4, jnp.int32)

    def results(way, **options):
        def loss(x, weights, *matrices):
            out = way(x, weights, chosen, matrices, activation="silu", **options)
            return jnp.sum(jnp.square(out)), out

        return jax.value_and_grad(loss, argnums=range(5), has_aux=True)(x, weights, *matrices)

    expected = results(loop_over_experts)
    emulate_kernels(monkeypatch)
    for ours, plain in zip(*map(jax.tree.leaves, (results(ragged_experts, has_remote=True), expected)), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_of_experts_has_the_same_loss_and_gradients_through_the_kernels(monkeypatch, dtype):
    config = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    model = init_model({**TINY, **config, "model_type": "qwen3_moe", "norm_topk_prob": True})
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 96, (2, 20)), jnp.int32)
    params = jax.tree.map(lambda x: x.astype(dtype), model.params)

    def results():
        def loss(params):
            logp = jax.nn.log_softmax(logits(model.config, params, tokens[:, :-1]).astype(jnp.float32))
            return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], 2))

        return jax.value_and_grad(loss)(params)

    expected = results()
    emulate_kernels(monkeypatch)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for ours, plain in zip(*map(jax.tree.leaves, (results(), expected)), strict=True):
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(plain, np.float32), rtol=tolerance, atol=tolerance
        )
