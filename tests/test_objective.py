"""Advantages, losses and aggregation against numpy and against their own laws."""

import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax.objective.advantages import group_advantages
from groupax.objective.aggregation import ROW_WEIGHTS, Denominators
from groupax.objective.kl import ESTIMATORS
from groupax.objective.losses import LOSSES
from groupax.objective.objective import policy_objective
from groupax.objective.ratios import RATIOS
from groupax.objective.settings import ImportanceSamplingLevel, KLEstimator, LossType, ObjectiveSettings

NAN = float("nan")


def advantages_of(rewards, weights=None, num_generations=4, **settings):
    rewards = np.asarray(rewards, float)
    rewards = rewards[:, None] if rewards.ndim == 1 else rewards
    weights = np.ones(rewards.shape[1]) if weights is None else np.asarray(weights, float)
    return group_advantages(rewards, weights, num_generations, **settings)


def test_advantages_are_standardized_in_their_group():
    rewards = np.random.default_rng(0).normal(size=(3, 4))
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(advantages_of(rewards.ravel()).values, expected.ravel())
    centred = rewards - rewards.mean(1, keepdims=True)
    np.testing.assert_allclose(advantages_of(rewards.ravel(), scale="none").values, centred.ravel())
    by_batch = centred / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(advantages_of(rewards.ravel(), scale="batch").values, by_batch.ravel())


def test_rewards_are_weighted_and_summed():
    rewards = np.random.default_rng(1).normal(size=(8, 2))
    both = advantages_of(rewards, weights=[2.0, -0.5])
    np.testing.assert_allclose(both.values, advantages_of(2 * rewards[:, 0] - 0.5 * rewards[:, 1]).values)
    np.testing.assert_allclose(both.rewards, 2 * rewards[:, 0] - 0.5 * rewards[:, 1])


def test_equal_rewards_teach_nothing():
    result = advantages_of([0.1, 0.1, 0.1, 0.1, 1.0, 0.0, 1.0, 0.0])
    assert result.values[:4].tolist() == [0.0] * 4
    assert result.zero_std.tolist() == [True, False]
    # 0.1 + 0.2 in another order differs in the last bit; that is no signal
    assert advantages_of([[0.1, 0.2], [0.2, 0.1], [0.3, 0.0], [0.0, 0.3]]).zero_std.all()


def test_a_row_that_a_function_skips_is_neither_punished_nor_favoured():
    rewards = [[1.0, 5.0], [0.0, NAN], [1.0, 5.0], [0.0, NAN]]
    np.testing.assert_allclose(advantages_of(rewards, scale="none").values, [0.5, -0.5, 0.5, -0.5])


def test_rows_without_any_reward_are_left_out():
    result = advantages_of([1.0, 0.0, NAN, NAN], scale="none")
    np.testing.assert_allclose(result.values, [0.5, -0.5, 0.0, 0.0])
    assert np.isnan(result.rewards).tolist() == [False, False, True, True]
    assert advantages_of([NAN] * 4).values.tolist() == [0.0] * 4


def test_ragged_groups_are_refused():
    with pytest.raises(ValueError, match="6 rows"):
        advantages_of(np.zeros(6))


def test_tables_list_the_words_of_the_settings():
    assert set(LOSSES) == set(ROW_WEIGHTS) == set(get_args(LossType))
    assert set(RATIOS) == set(get_args(ImportanceSamplingLevel))
    assert set(ESTIMATORS) == set(get_args(KLEstimator))


def a_batch(seed=0, B=6, T=7):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, T + 1, B)
    return {
        "logp": rng.normal(-2, 0.5, (B, T)).astype(np.float32),
        "entropy": rng.random((B, T)).astype(np.float32),
        "old_logp": rng.normal(-2, 0.5, (B, T)).astype(np.float32),
        "ref_logp": rng.normal(-2, 0.5, (B, T)).astype(np.float32),
        "advantages": rng.normal(size=B).astype(np.float32),
        "mask": np.arange(T)[None, :] < lengths[:, None],
    }


def counts_of(mask):
    return Denominators(jnp.float32(mask.any(1).sum()), jnp.float32(mask.sum()))


def loss_of(batch, settings, counts=None):
    counts = counts or counts_of(batch["mask"])
    batch = {name: None if x is None else jnp.asarray(x) for name, x in batch.items()}
    return policy_objective(**batch, counts=counts, settings=settings)[0]


def numpy_loss(batch, settings):
    r = np.clip(batch["logp"] - batch["old_logp"], -20, 20).astype(np.float64)
    mask = batch["mask"].astype(np.float64)
    A = batch["advantages"][:, None].astype(np.float64)
    w = np.exp(r)
    if settings.importance_sampling_level == "sequence":
        w = np.exp((r * mask).sum(1) / mask.sum(1))[:, None] * np.ones_like(r)
    bounded = w if settings.delta is None else np.minimum(w, settings.delta)
    loss = -np.minimum(bounded * A, np.clip(w, 1 - settings.epsilon, 1 + settings.epsilon_high) * A)
    if settings.beta:
        d = (batch["ref_logp"] - batch["logp"]).astype(np.float64)
        kl = {"k2": d**2 / 2, "k3": np.exp(d) - d - 1}[settings.kl_estimator]
        loss = loss + settings.beta * (kl * w if settings.use_bias_correction_kl else kl)
    summed = (loss * mask).sum(1)
    return {
        "grpo": (summed / mask.sum(1)).mean(),
        "bnpo": summed.sum() / mask.sum(),
        "dapo": summed.sum() / mask.sum(),
        "dr_grpo": summed.sum() / (len(summed) * settings.max_completion_length),
    }[settings.loss_type]


CASES = [
    {},
    {"epsilon_high": 0.28},
    {"delta": 1.5},
    {"beta": 0.1},
    {"beta": 0.1, "kl_estimator": "k2"},
    {"beta": 0.1, "use_bias_correction_kl": False},
    {"importance_sampling_level": "sequence"},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_loss_is_the_formula(loss_type, case):
    settings = ObjectiveSettings(loss_type=loss_type, max_completion_length=16, **case)
    batch = a_batch()
    given = batch if settings.beta else {**batch, "ref_logp": None}
    np.testing.assert_allclose(loss_of(given, settings), numpy_loss(batch, settings), rtol=1e-5)
    jitted = jax.jit(lambda logp: loss_of({**given, "logp": logp}, settings))
    np.testing.assert_allclose(jitted(jnp.asarray(batch["logp"])), numpy_loss(batch, settings), rtol=1e-5)


@pytest.mark.parametrize("loss_type", get_args(LossType))
@pytest.mark.parametrize("cuts", [[3], [1, 2, 4], [1, 2, 3, 4, 5]])
def test_splitting_a_step_changes_neither_loss_nor_gradient(loss_type, cuts):
    settings = ObjectiveSettings(loss_type=loss_type, beta=0.05)
    batch = a_batch()
    counts = counts_of(batch["mask"])
    edges = [0, *cuts, 6]
    parts = [{name: x[a:b] for name, x in batch.items()} for a, b in itertools.pairwise(edges)]

    def value_and_grad(batch):
        return jax.value_and_grad(lambda logp: loss_of({**batch, "logp": logp}, settings, counts))(batch["logp"])

    whole, whole_grad = value_and_grad(batch)
    losses, grads = zip(*(value_and_grad(part) for part in parts), strict=True)
    np.testing.assert_allclose(sum(losses), whole, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(grads), whole_grad, atol=1e-6)


@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_on_policy_gradient_is_reinforce_with_the_group_baseline(loss_type):
    settings = ObjectiveSettings(loss_type=loss_type, max_completion_length=16)
    batch = {**a_batch(), "old_logp": None, "ref_logp": None}
    grad = jax.grad(lambda logp: loss_of({**batch, "logp": logp}, settings))(jnp.asarray(batch["logp"]))
    lengths, mask = batch["mask"].sum(1), batch["mask"]
    weights = {"grpo": 1 / (6 * lengths), "dr_grpo": np.full(6, 1 / (6 * 16))}.get(
        loss_type, np.full(6, 1 / mask.sum())
    )
    np.testing.assert_allclose(grad, -(batch["advantages"] * weights)[:, None] * mask, atol=1e-7)


def test_masked_tokens_have_no_say():
    batch = a_batch()
    poisoned = {
        name: np.where(batch["mask"], x, np.inf) if name in ("logp", "old_logp", "ref_logp", "entropy") else x
        for name, x in batch.items()
    }
    settings = ObjectiveSettings(beta=0.1)
    value, grad = jax.value_and_grad(lambda logp: loss_of({**poisoned, "logp": logp}, settings))(
        jnp.asarray(poisoned["logp"])
    )
    np.testing.assert_allclose(value, loss_of(batch, settings), rtol=1e-6)
    assert np.isfinite(grad).all()


def test_extreme_log_ratios_stay_finite():
    batch = {
        **a_batch(),
        "old_logp": np.full((6, 7), -500.0, np.float32),
        "ref_logp": np.full((6, 7), 500.0, np.float32),
    }
    settings = ObjectiveSettings(beta=0.1)
    value, grad = jax.value_and_grad(lambda logp: loss_of({**batch, "logp": logp}, settings))(
        jnp.asarray(batch["logp"])
    )
    assert np.isfinite(value)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize(
    ("estimator", "corrected", "exact"), [("k2", False, True), ("k3", True, True), ("k3", False, False)]
)
def test_expected_kl_gradient_over_a_small_policy(estimator, corrected, exact):
    rng = np.random.default_rng(0)
    theta, ref = (
        jnp.asarray(rng.normal(size=5), jnp.float32),
        jax.nn.log_softmax(jnp.asarray(rng.normal(size=5), jnp.float32)),
    )

    def true_kl(theta):
        logp = jax.nn.log_softmax(theta)
        return jnp.sum(jnp.exp(logp) * (logp - ref))

    def expected_estimate(theta):
        logp = jax.nn.log_softmax(theta)
        estimate = ESTIMATORS[estimator](logp[:, None], ref[:, None])[:, 0]
        if corrected:
            estimate = estimate * jnp.exp(logp - jax.lax.stop_gradient(logp))
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp)) * estimate)

    error = float(jnp.abs(jax.grad(expected_estimate)(theta) - jax.grad(true_kl)(theta)).max())
    assert (error < 1e-5) == exact
