"""What is traced goes by the mesh's platform, not by the machine that traces."""

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
from groupax.parallel.mesh import AXES
from groupax.parallel.runtime import traced_platform
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


@pytest.mark.parametrize("platform", DEVICES)
def test_the_platform_is_that_of_the_mesh(platform):
    seen = []
    whole = PartitionSpec()

    def local(x):
        seen.append(traced_platform())
        return x

    jax.make_jaxpr(jax.shard_map(local, mesh=mesh_of(platform), in_specs=whole, out_specs=whole))(1.0)
    assert seen == [platform]
    assert traced_platform() == jax.default_backend()
