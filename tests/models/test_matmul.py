"""Products of factors of fewer bits, their gradients, and the memory that programs take."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax.models.matmul import cpu_multiplies_bfloat16, matmul, matmul_nt
from tests.conftest import rest_heavy


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
