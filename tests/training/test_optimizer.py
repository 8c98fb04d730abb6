"""Optimizers, schedules and decay masks, against formulas in numpy."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from groupax.core.config import GRPOConfig
from groupax.core.settings.optimizer import (
    LearningRateSettings,
    LRScheduler,
    OptimizerName,
    OptimizerSettings,
    WeightDecayScope,
)
from groupax.training.optimizer import OPTIMIZERS, make_optimizer, make_schedule
from tests.conftest import rest_heavy

RATE = 0.1


def weights():
    rng = np.random.default_rng(0)
    return {
        "embed": jnp.asarray(rng.normal(size=(6, 4)), jnp.float32),
        "layers": [{"q": jnp.asarray(rng.normal(size=(4, 4)), jnp.float32), "norm": jnp.ones(4)}],
    }


def step(optimizer, params, grads):
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


def test_the_config_lists_the_tables():
    def choices(name):
        return get_args(GRPOConfig.__dataclass_fields__[name].type)

    assert set(OPTIMIZERS) == set(get_args(OptimizerName)) == set(choices("optimizer"))
    assert choices("lr_scheduler_type") == get_args(LRScheduler)
    assert choices("weight_decay_scope") == get_args(WeightDecayScope)


@pytest.mark.heavy
@pytest.mark.parametrize("name", rest_heavy(get_args(OptimizerName), quick=2))
@pytest.mark.parametrize("scope", get_args(WeightDecayScope))
def test_decay_is_decoupled_and_spares_norms_unless_told(name, scope):
    """With a zero gradient all that is left of a step is the decay."""
    settings = OptimizerSettings(optimizer=name, weight_decay=0.5, weight_decay_scope=scope)
    params = weights()
    after = step(make_optimizer(settings, optax.constant_schedule(RATE)), params, jax.tree.map(jnp.zeros_like, params))
    shrunk = 1 - RATE * 0.5
    np.testing.assert_allclose(after["embed"], params["embed"] * shrunk, rtol=1e-6)
    np.testing.assert_allclose(after["layers"][0]["q"], params["layers"][0]["q"] * shrunk, rtol=1e-6)
    np.testing.assert_allclose(after["layers"][0]["norm"], np.ones(4) * (shrunk if scope == "all" else 1.0), rtol=1e-6)


def test_adamw_is_the_formula():
    settings = OptimizerSettings(adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3, max_grad_norm=0.0)
    optimizer = make_optimizer(settings, optax.constant_schedule(RATE))
    params, m, v = {"w": jnp.ones(3)}, np.zeros(3), np.zeros(3)
    state, expected = optimizer.init(params), np.ones(3)
    for t in range(1, 4):
        grad = np.array([1.0, -2.0, 0.5]) * t
        updates, state = optimizer.update({"w": jnp.asarray(grad, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
        m, v = 0.8 * m + 0.2 * grad, 0.9 * v + 0.1 * grad**2
        expected = expected - RATE * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
    np.testing.assert_allclose(params["w"], expected, rtol=1e-6)


@pytest.mark.parametrize(("max_norm", "norm"), [(1.0, 1.0), (0.0, 10.0), (100.0, 10.0)])
def test_gradients_are_clipped_to_a_global_norm(max_norm, norm):
    settings = OptimizerSettings(optimizer="sgd", max_grad_norm=max_norm)
    after = step(
        make_optimizer(settings, optax.constant_schedule(1.0)), {"w": jnp.zeros(2)}, {"w": jnp.asarray([6.0, 8.0])}
    )
    np.testing.assert_allclose(np.linalg.norm(after["w"]), norm, rtol=1e-6)


def test_muon_takes_the_layers_matrices_only():
    params = weights()
    grads = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32), params)
    settings = OptimizerSettings(optimizer="muon", max_grad_norm=0.0)
    after = step(make_optimizer(settings, optax.constant_schedule(RATE)), params, grads)
    moved = after["layers"][0]["q"] - params["layers"][0]["q"]
    singular = np.linalg.svd(moved, compute_uv=False)
    assert singular.min() > 0.4 * singular.max()  # nearly orthogonal, as the gradient is not
    # the others move as AdamW's first step: by the rate, in the gradient's direction
    np.testing.assert_allclose(after["embed"] - params["embed"], -RATE * np.sign(grads["embed"]), rtol=1e-3)


def test_schedules():
    def rates(steps, **settings):
        schedule = make_schedule(LearningRateSettings(learning_rate=1.0, **settings), num_steps=10)
        return [float(schedule(step)) for step in steps]

    np.testing.assert_allclose(rates([0, 5, 9], lr_scheduler_type="constant"), [1, 1, 1])
    np.testing.assert_allclose(rates([0, 5, 10], learning_rate_end=0.2), [1, 0.6, 0.2])
    np.testing.assert_allclose(rates([0, 5, 10], lr_scheduler_type="cosine", learning_rate_end=0.2), [1, 0.6, 0.2])
    np.testing.assert_allclose(rates([0, 1, 2, 6, 10], warmup_steps=2), [0, 0.5, 1, 0.5, 0])
    assert rates(range(10), warmup_ratio=0.2) == rates(range(10), warmup_steps=2)
    assert make_schedule(LearningRateSettings(learning_rate=0.0, lr_scheduler_type="cosine"), 10)(3) == 0
