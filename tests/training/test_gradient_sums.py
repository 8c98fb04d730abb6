"""Gradients that add up many terms are added up in float32, whatever the dtype of the weights; float64 is the oracle.

Each case differentiates sum(cotangent * function(weight)) for a weight in bfloat16 that very many tokens share, and
compares with the same sum over the same bfloat16 numbers in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax.models.adapted import AdaptedWeight, LowRank
from groupax.models.layers import linear, lookup, vocabulary_logits
from groupax.models.logprobs import token_logprobs
from groupax.parallel.collectives import all_gather, psum, psum_grad
from groupax.parallel.mesh import AXES, make_mesh

TOKENS, DIM = 8192, 16
RNG = np.random.default_rng(0)


def narrow(*shape, mean=0.0):
    return jnp.asarray(RNG.normal(mean, 1.0, shape), jnp.bfloat16)


def exact(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def gradient_of(function, weight, cotangent):
    """In bfloat16, of the sum of the products with a cotangent."""
    return exact(jax.jit(lambda w: jax.vjp(function, w)[1](cotangent)[0])(weight))


def relative_error(ours, oracle):
    return np.linalg.norm(ours - oracle) / np.linalg.norm(oracle)


# Terms with a mean, so that sums grow: in bfloat16 they would stop at some hundreds of terms.
X, COTANGENT = narrow(TOKENS, DIM, mean=1.0), narrow(TOKENS, DIM, mean=1.0)


def test_embeddings_of_a_token_that_occurs_8192_times():
    tokens = jnp.asarray(np.where(RNG.random(2 * TOKENS) < 0.5, 7, RNG.integers(0, 64, 2 * TOKENS)), jnp.int32)
    cotangent = narrow(2 * TOKENS, DIM, mean=1.0)
    ours = gradient_of(lambda table: lookup(table, tokens), narrow(64, DIM), cotangent)
    oracle = np.zeros((64, DIM))
    np.add.at(oracle, np.asarray(tokens), exact(cotangent))
    assert int((tokens == 7).sum()) > 8000
    assert relative_error(ours, oracle) < 4e-3
    assert relative_error(ours[7], oracle[7]) < 4e-3


def test_keys_of_a_prompt_that_many_rows_share():
    rows = jnp.asarray(RNG.integers(0, 2, 1024), jnp.int32)
    cotangent = narrow(1024, 3, 2, DIM, mean=1.0)
    ours = gradient_of(lambda keys: lookup(keys, rows), narrow(2, 3, 2, DIM), cotangent)
    oracle = np.stack([exact(cotangent)[np.asarray(rows) == row].sum(axis=0) for row in range(2)])
    assert relative_error(ours, oracle) < 4e-3


def test_both_matrices_of_an_adapter():
    base, a, b = jnp.zeros((DIM, DIM), jnp.bfloat16), narrow(4, DIM), narrow(DIM, 4)

    def adapted(change):
        return linear(X, AdaptedWeight(base, change))

    ours = jax.jit(lambda change: jax.vjp(adapted, change)[1](COTANGENT)[0])(LowRank(a, b, 0.5))
    inner = 0.5 * exact(X) @ exact(a).T
    assert relative_error(exact(ours.b), exact(COTANGENT).T @ inner) < 1e-2
    assert relative_error(exact(ours.a), (0.5 * exact(COTANGENT) @ exact(b)).T @ exact(X)) < 1e-2


def test_the_head_of_the_vocabulary():
    targets = jnp.asarray(RNG.integers(0, 32, TOKENS), jnp.int32)
    head, cotangent = narrow(32, DIM) * 0.3, jnp.ones(TOKENS)
    ours = gradient_of(lambda head: token_logprobs(X, head, targets, 1.0)[0], head, cotangent)
    logits = exact(X) @ exact(head).T
    probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    oracle = (np.eye(32)[np.asarray(targets)] - probs).T @ exact(X)
    assert relative_error(ours, oracle) < 1e-2
    dense = gradient_of(lambda head: vocabulary_logits(X, head), head, jnp.asarray(probs, jnp.float32))
    assert relative_error(dense, probs.T @ exact(X)) < 1e-2


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("axis", ["tp", "fsdp"])
def test_what_devices_add_up(axis):
    mesh = make_mesh([4 if name == axis else 1 for name in AXES])
    parts = narrow(4, 256, DIM, mean=1.0)
    total = exact(parts).sum(axis=0)

    def on_devices(function, *out):
        spec = jax.sharding.PartitionSpec(axis)
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(parts)

    forward = on_devices(lambda x: psum(x, axis))
    shared = on_devices(lambda x: jax.vjp(lambda w: psum_grad(w, axis), x)[1](x)[0])
    split = on_devices(lambda x: jax.vjp(lambda w: all_gather(w, axis, 0), x[0, :64])[1](x[0])[0][None])
    assert relative_error(exact(forward)[0], total) < 1e-2
    assert relative_error(exact(shared)[0], total) < 1e-2
    assert relative_error(exact(split).reshape(256, DIM), total) < 4e-3
