"""Norms: values and gradients against the plain formulas in float64, and what they keep for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax.models import decoder
from groupax.models.decoder import _norm_heads
from groupax.models.families import read_config
from groupax.models.layers import NORMS
from tests.conftest import TINY, assert_trees_match

EPS = 1e-5
# shapes of x and of a weight: tokens, heads that share a weight, heads that each have one
SHAPES = {"tokens": ((6, 40), (40,)), "head": ((6, 4, 16), (16,)), "each_head": ((6, 4, 16), (4, 16))}


def plain_norm(kind, x, weight):
    """Computes a norm by its definition, in the dtype of its inputs."""
    x = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    factor = 1 + weight if kind == "zero_centered_rms" else weight
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
@pytest.mark.parametrize("kind", NORMS)
def test_norms_and_their_gradients_follow_their_formulas_in_float64(kind, shape, dtype):
    given = inputs(SHAPES[shape], dtype)
    ours = jax.jit(lambda *given: value_and_gradients(lambda x, weight: NORMS[kind](x, weight, EPS), *given))(*given)
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


@pytest.mark.heavy
@pytest.mark.parametrize("shared", [True, False], ids=["shared-weight", "weight-per-head"])
def test_heads_that_are_normed_together_get_the_same_norms(shared, monkeypatch):
    config = read_config({**TINY, "model_type": "qwen3"})
    q, k = (jax.random.normal(jax.random.key(heads), (7, heads, 16)) for heads in (6, 2))
    weights = [jax.random.normal(jax.random.key(9), x.shape[2 if shared else 1 :]) for x in (q, k)]
    apart = _norm_heads(config, q, k, *weights)
    monkeypatch.setattr(decoder, "traced_platform", lambda: "gpu")
    together = _norm_heads(config, q, k, *weights)
    assert_trees_match(together, apart)
