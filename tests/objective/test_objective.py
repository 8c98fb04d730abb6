"""Advantages, losses and aggregation against numpy and against their own laws."""

import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax.core.settings.objective import (
    CLIPPED,
    WEIGHTED_BY_LENGTH,
    ImportanceSamplingLevel,
    KLEstimator,
    LossType,
    ObjectiveSettings,
    RolloutCorrection,
)
from groupax.objective.advantages import group_advantages
from groupax.objective.aggregation import Denominators, seq_mean_token_sum_norm, token_mean
from groupax.objective.losses import LOSSES, LossInputs, policy_objective, ppo_clip_loss, zero_metrics
from groupax.objective.ratios import ESTIMATORS, RATIOS
from groupax.rollouts.completions import reward_metrics
from tests.conftest import assert_trees_match, rest_heavy

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


def test_equal_rewards_teach_nothing():
    result = advantages_of([0.1, 0.1, 0.1, 0.1, 1.0, 0.0, 1.0, 0.0])
    assert result.values[:4].tolist() == [0.0] * 4
    assert result.zero_std.tolist() == [True, False]
    # 0.1 + 0.2 in another order differs in the last bit; that is no signal
    assert advantages_of([[0.1, 0.2], [0.2, 0.1], [0.3, 0.0], [0.0, 0.3]]).zero_std.all()


def test_each_reward_can_be_normalized_before_the_sum():
    rewards = np.random.default_rng(3).normal(size=(12, 2)) * np.array([1.0, 100.0])
    grouped = rewards.reshape(3, 4, 2)
    z = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + 1e-4)
    s = (z * np.array([2.0, 1.0])).sum(2).ravel()
    result = advantages_of(rewards, [2.0, 1.0], aggregation="normalize_then_sum")
    np.testing.assert_allclose(result.values, (s - s.mean()) / (s.std(ddof=1) + 1e-4))
    np.testing.assert_allclose(result.rewards, rewards @ [2.0, 1.0])


def test_normalizing_first_leaves_out_what_does_not_apply():
    rewards = [[1.0, 5.0], [0.0, NAN], [1.0, 7.0], [NAN, NAN], *[[0.5, 0.1 + 0.2], [0.5, 0.3]] * 2]
    result = advantages_of(rewards, aggregation="normalize_then_sum")
    assert np.isfinite(result.values).all()
    assert result.values[3] == 0.0
    assert result.values[4:].tolist() == [0.0] * 4
    assert result.zero_std.tolist() == [False, True]
    assert advantages_of([NAN] * 4, aggregation="normalize_then_sum").values.tolist() == [0.0] * 4


def test_rows_without_any_reward_are_left_out():
    result = advantages_of([1.0, 0.0, NAN, NAN], scale="none")
    np.testing.assert_allclose(result.values, [0.5, -0.5, 0.0, 0.0])
    assert np.isnan(result.rewards).tolist() == [False, False, True, True]
    assert advantages_of([NAN] * 4).values.tolist() == [0.0] * 4


def test_the_spread_of_rewards_over_the_batch_and_within_groups():
    def metrics_of(values):
        rewards = np.array(values)[:, None]
        return reward_metrics(["f"], rewards, group_advantages(rewards, np.ones(1), 4))

    values = [0.0, 1.0, 0.25, 0.5]
    found = metrics_of([*values, 2.0, 2.0, 2.0, 2.0])
    assert found["reward_std"] == pytest.approx(np.std([*values, *[2.0] * 4], ddof=1)) == found["rewards/f/std"]
    assert found["reward_group_std"] == pytest.approx(np.std(values, ddof=1) / 2)
    assert metrics_of([*[NAN] * 4, *values])["reward_std"] == pytest.approx(np.std(values, ddof=1))
    assert metrics_of([NAN] * 8)["reward_std"] == 0.0


# -- losses


def test_tables_list_the_words_of_the_settings():
    assert set(LOSSES) == set(get_args(LossType))
    assert {name for name, loss in LOSSES.items() if loss.token_loss is ppo_clip_loss} == set(CLIPPED)
    by_length = (token_mean, seq_mean_token_sum_norm)
    assert {name for name, loss in LOSSES.items() if loss.aggregation in by_length and not loss.uses_correction} == set(
        WEIGHTED_BY_LENGTH
    )
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
        "rollout_logp": rng.normal(-2, 0.5, (B, T)).astype(np.float32),
        "sampler_logp": rng.normal(-2, 0.5, (B, T)).astype(np.float32),
        "policy_mask": rng.random((B, T)) < 0.6,
        "advantages": np.repeat(rng.normal(size=(B, 1)).astype(np.float32), T, axis=1),
        "mask": np.arange(T)[None, :] < lengths[:, None],
    }


def episodes(seed=0, B=6, T=12):
    """A batch of rows of several turns, with tokens of the environment between them and an advantage per turn."""
    rng = np.random.default_rng(seed)
    batch = a_batch(seed, B, T)
    advantages, mask = np.zeros((2, B, T))
    for i, end in enumerate(rng.integers(5, T + 1, B)):
        cuts = [0, *np.sort(rng.choice(np.arange(1, end), 4 if i else 2, replace=False)), end]
        for turn, (start, stop) in enumerate(zip(cuts[::2], cuts[1::2], strict=True)):
            mask[i, start:stop], advantages[i, start:stop] = 1, rng.normal() * (-1) ** turn
    return {**batch, "advantages": advantages.astype(np.float32), "mask": mask > 0}


def counts_of(mask):
    return Denominators(jnp.float32(mask.any(1).sum()), jnp.float32(mask.sum()))


def given_for(settings, batch, on_policy=False, top_entropy=False):
    """The batch without what these settings do not use."""
    absent = set()
    absent |= set() if settings.beta else {"ref_logp"}
    absent |= set() if settings.rollout_correction != "none" else {"sampler_logp"}
    absent |= set() if top_entropy else {"policy_mask"}
    absent |= {"old_logp"} if on_policy else set()
    return {name: None if name in absent else x for name, x in batch.items()}


def objective_of(batch, settings, counts=None, entropy_coef=0.0):
    counts = counts or counts_of(np.asarray(batch["mask"]))
    batch = {name: None if x is None else jnp.asarray(x) for name, x in batch.items()}
    logp, entropy = batch.pop("logp"), batch.pop("entropy")
    return policy_objective(logp, entropy, LossInputs(**batch), counts, settings, entropy_coef)


def loss_of(batch, settings, counts=None, entropy_coef=0.0):
    return objective_of(batch, settings, counts, entropy_coef)[0]


def numpy_loss(batch, settings, top_entropy=False, entropy_coef=0.0):
    """The formulas once more, row by row, in float64."""
    x = {name: np.asarray(value, np.float64) for name, value in batch.items() if name not in ("mask", "policy_mask")}
    total = bonus = 0.0
    num_tokens, num_rows = batch["mask"].sum(), batch["mask"].any(1).sum()
    for i, mask in enumerate(batch["mask"]):
        logp, old, A = x["logp"][i, mask], x["old_logp"][i, mask], x["advantages"][i, mask]
        n = mask.sum()
        r = np.clip(logp - old, -20, 20)
        w = {"token": np.exp(r), "sequence_sum": np.full(n, np.exp(r.sum()))}.get(
            settings.importance_sampling_level, np.full(n, np.exp(r.mean()))
        )
        low, high = 1 - settings.epsilon, 1 + settings.upper_epsilon
        rho = np.ones(n)
        level, _, bound = settings.rollout_correction.rpartition("_")
        if level:
            d = old - x["sampler_logp"][i, mask]
            d = {"token": d, "sequence": np.full(n, d.mean()), "sequence_sum": np.full(n, d.sum())}[level]
            lo = -np.inf if settings.rollout_correction_min is None else settings.rollout_correction_min
            hi = np.inf if settings.rollout_correction_max is None else settings.rollout_correction_max
            rho = np.exp(d)
            rho = np.clip(rho, lo, hi) if bound == "truncate" else np.where((rho < lo) | (rho > hi), 0.0, rho)
        if settings.loss_type == "cispo":
            loss = -np.minimum(w, settings.upper_epsilon) * A * logp
        elif settings.loss_type == "sapo":
            tau = np.where(A > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
            loss = -4 / tau / (1 + np.exp(-tau * (w - 1))) * A
        elif settings.loss_type == "vespo":
            k = np.where(A >= 0, settings.vespo_k_pos, settings.vespo_k_neg)
            lam = np.where(A >= 0, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
            log_rho = np.log(np.maximum(rho, 1e-8)) if level else np.zeros(n)
            log_rho = log_rho[0] if level == "sequence_sum" else log_rho.sum()
            log_w = np.clip(r.sum() + log_rho, np.log(1e-8), 20)
            loss = -np.exp(lam + k * log_w - lam * np.exp(log_w)) * A * logp
        else:
            bounded = w if settings.delta is None else np.minimum(w, settings.delta)
            loss = -np.minimum(bounded * A, np.clip(w, low, high) * A)
        if settings.off_policy_mask_threshold is not None:
            drift = (x["rollout_logp"][i, mask] - logp).mean()
            loss = loss * ((A >= 0) | (drift <= settings.off_policy_mask_threshold))
        if top_entropy:
            loss = loss * batch["policy_mask"][i, mask]
        if settings.loss_type != "vespo":
            loss = loss * rho
        if settings.beta:
            d = x["ref_logp"][i, mask] - logp
            kl = {"k2": d**2 / 2, "k3": np.exp(d) - d - 1}[settings.kl_estimator]
            loss = loss + settings.beta * (kl * w if settings.use_bias_correction_kl else kl)
        by_row, by_token = 1 / num_rows, 1 / num_tokens
        weight = {"grpo": by_row / n, "sapo": by_row / n, "luspo": by_row}.get(settings.loss_type, by_token)
        weight = by_row / settings.max_completion_length if settings.loss_type == "dr_grpo" else weight
        total += loss.sum() * weight
        bonus += x["entropy"][i, mask].sum() / num_tokens
    return total - entropy_coef * bonus


CASES = [
    {},
    {"epsilon_high": 0.28},
    {"delta": 1.5},
    {"beta": 0.1},
    {"beta": 0.1, "kl_estimator": "k2"},
    {"beta": 0.1, "use_bias_correction_kl": False},
    {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence_sum"},
    {"off_policy_mask_threshold": 0.0},
    {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    {"vespo_k_pos": 1.5, "vespo_lambda_pos": 1.0, "vespo_k_neg": 2.5, "vespo_lambda_neg": 0.5},
    {"entropy_bonus": True},
    *({"rollout_correction": word, "rollout_correction_max": 1.2} for word in get_args(RolloutCorrection)[1:]),
    {"rollout_correction": "token_truncate", "rollout_correction_min": 0.9, "rollout_correction_max": None},
    {"rollout_correction": "token_mask", "rollout_correction_min": 0.9, "rollout_correction_max": 1.3},
]


@pytest.mark.drawn(40)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("loss_type", get_args(LossType))
@pytest.mark.parametrize("make", rest_heavy([a_batch, episodes]))
def test_loss_is_the_formula(make, loss_type, case):
    settings = ObjectiveSettings(loss_type=loss_type, max_completion_length=16, **case)
    batch = make()
    for top_entropy in (False, True):
        given = given_for(settings, batch, top_entropy=top_entropy)
        coef = 0.3 if settings.entropy_bonus else 0.0
        expected = numpy_loss(batch, settings, top_entropy, coef)
        np.testing.assert_allclose(loss_of(given, settings, None, coef), expected, rtol=2e-5)
    loss, metrics = jax.jit(lambda logp: objective_of({**given, "logp": logp}, settings, None, coef))(batch["logp"])
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    assert jax.tree.structure(metrics) == jax.tree.structure(zero_metrics(settings))


@pytest.mark.drawn(12)
@pytest.mark.heavy
@pytest.mark.parametrize("importance_sampling_level", rest_heavy(get_args(ImportanceSamplingLevel)))
@pytest.mark.parametrize("loss_type", rest_heavy(get_args(LossType)))
@pytest.mark.parametrize("cuts", rest_heavy([[1, 2, 4], [3], [1, 2, 3, 4, 5]]))
def test_splitting_a_step_changes_neither_loss_nor_gradient(loss_type, importance_sampling_level, cuts):
    settings = ObjectiveSettings(
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        beta=0.05,
        rollout_correction="sequence_truncate",
        off_policy_mask_threshold=0.1,
        entropy_bonus=True,
    )
    batch = episodes()
    counts = counts_of(batch["mask"])
    edges = [0, *cuts, 6]
    parts = [{name: x[a:b] for name, x in batch.items()} for a, b in itertools.pairwise(edges)]

    def value_and_grad(batch):
        return jax.value_and_grad(lambda logp: loss_of({**batch, "logp": logp}, settings, counts, 0.1))(batch["logp"])

    whole, whole_grad = value_and_grad(batch)
    losses, grads = zip(*(value_and_grad(part) for part in parts), strict=True)
    np.testing.assert_allclose(sum(losses), whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(grads), whole_grad, atol=1e-6)


@pytest.mark.parametrize("importance_sampling_level", get_args(ImportanceSamplingLevel))
@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_on_policy_gradient_is_reinforce_with_the_group_baseline(loss_type, importance_sampling_level):
    settings = ObjectiveSettings(
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        max_completion_length=16,
        epsilon=0.0 if loss_type != "cispo" else 0.2,  # the ratio of 1 is then at both bounds
        epsilon_high=5.0 if loss_type == "cispo" else None,
    )
    batch = given_for(settings, a_batch(), on_policy=True)
    grad = jax.grad(lambda logp: loss_of({**batch, "logp": logp}, settings))(jnp.asarray(batch["logp"]))
    lengths, mask = batch["mask"].sum(1), batch["mask"]
    weights = {
        "grpo": 1 / (6 * lengths),
        "sapo": 1 / (6 * lengths),
        "luspo": np.full(6, 1 / 6),
        "dr_grpo": np.full(6, 1 / (6 * 16)),
    }.get(loss_type, np.full(6, 1 / mask.sum()))
    if importance_sampling_level == "sequence_sum" and loss_type not in ("cispo", "vespo"):
        weights = weights * lengths  # each token's loss has the gradient of the whole row's probability
    np.testing.assert_allclose(grad, -batch["advantages"] * weights[:, None] * mask, atol=1e-7)


@pytest.mark.drawn(20)
@pytest.mark.parametrize("case", rest_heavy(CASES, quick=6), ids=str)
@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_tokens_of_the_environment_have_no_gradient_and_no_effect(loss_type, case):
    settings = ObjectiveSettings(loss_type=loss_type, max_completion_length=16, **case)
    batch, counts = given_for(settings, episodes()), counts_of(episodes()["mask"])
    mask = batch["mask"]

    def value_and_grads(batch):
        return jax.value_and_grad(
            lambda x: loss_of({**batch, "logp": x[0], "entropy": x[1]}, settings, counts, 0.3 * settings.entropy_bonus)
        )(jnp.stack([batch["logp"], batch["entropy"]]))

    def others(name, x):
        return np.where(mask, x, np.inf) if name.endswith("logp") or name == "entropy" else x

    loss, grads = value_and_grads(batch)
    assert not np.asarray(grads)[:, ~mask].any()
    assert np.asarray(grads)[0, mask].any()
    other_loss, other_grads = value_and_grads(
        {name: None if x is None else others(name, x) for name, x in batch.items()}
    )
    np.testing.assert_array_equal(other_loss, loss)
    np.testing.assert_array_equal(other_grads, grads)


@pytest.mark.parametrize("extreme", [500.0, np.inf])
@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_extreme_log_ratios_stay_finite(loss_type, extreme):
    settings = ObjectiveSettings(loss_type=loss_type, beta=0.1, rollout_correction="sequence_sum_truncate")
    batch = {
        **given_for(settings, a_batch()),
        "old_logp": np.full((6, 7), -extreme, np.float32),
        "ref_logp": np.full((6, 7), -extreme, np.float32),
        "sampler_logp": np.full((6, 7), -500.0, np.float32),
    }
    value, grad = jax.value_and_grad(lambda logp: loss_of({**batch, "logp": logp}, settings))(
        jnp.asarray(batch["logp"])
    )
    assert np.isfinite(value)
    assert np.isfinite(grad).all()


def test_rows_that_the_policy_has_just_sampled_lie_beside_rows_of_an_earlier_rollout():
    settings = ObjectiveSettings(beta=0.1, rollout_correction="token_truncate")
    batch = given_for(settings, a_batch())
    new = np.arange(len(batch["mask"]))[:, None] % 2 == 0
    mixed = {**batch, "old_logp": np.where(new, np.nan, batch["old_logp"])}
    spelled_out = {**batch, "old_logp": np.where(new, batch["logp"], batch["old_logp"])}
    losses = [
        jax.value_and_grad(lambda logp, given=given: loss_of({**given, "logp": logp}, settings))(batch["logp"])
        for given in (mixed, spelled_out)
    ]
    assert_trees_match(*losses)
    assert np.isfinite(losses[0][0])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("estimator", "corrected", "off_policy", "exact"),
    rest_heavy(
        [
            ("k2", False, False, True),
            ("k3", True, True, True),
            ("k3", False, False, False),
            ("k3", True, False, True),
            ("k2", True, False, True),
            ("k2", True, True, True),
            ("k2", False, True, False),
        ],
        quick=3,
    ),
)
def test_expected_kl_gradient_over_a_small_policy(estimator, corrected, off_policy, exact):
    rng = np.random.default_rng(0)
    theta, other, ref = (jnp.asarray(rng.normal(size=5), jnp.float32) for _ in range(3))
    ref = jax.nn.log_softmax(ref)
    sampled_from = jax.nn.log_softmax(other if off_policy else theta)

    def true_kl(theta):
        logp = jax.nn.log_softmax(theta)
        return jnp.sum(jnp.exp(logp) * (logp - ref))

    def expected_loss(theta):
        # each of the five answers once, as a row of one token, weighted by how often it would be sampled
        settings = ObjectiveSettings(beta=1.0, kl_estimator=estimator, use_bias_correction_kl=corrected)
        logp = jax.nn.log_softmax(theta)
        one, zero = Denominators(jnp.float32(1), jnp.float32(1)), jnp.zeros((1, 1))
        losses = []
        for answer in range(5):
            old, reference = sampled_from[answer, None, None], ref[answer, None, None]
            inputs = LossInputs(zero, jnp.ones((1, 1), bool), old, old, reference)
            losses.append(policy_objective(logp[answer, None, None], zero, inputs, one, settings)[0])
        return jnp.sum(jnp.exp(sampled_from) * jnp.stack(losses))

    error = float(jnp.abs(jax.grad(expected_loss)(theta) - jax.grad(true_kl)(theta)).max())
    assert (error < 1e-5) == exact
