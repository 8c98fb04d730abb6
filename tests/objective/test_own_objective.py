"""Losses, KL estimators and advantages from outside the package: by reference, as functions and as records."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax import GRPOConfig
from groupax.core.settings.objective import ObjectiveSettings
from groupax.core.settings.references import reference_to
from groupax.objective.aggregation import seq_mean_token_mean
from groupax.objective.losses import Loss, find_loss, ppo_clip_loss, ppo_clip_metrics, zero_metrics
from groupax.objective.ratios import k3
from tests.conftest import assert_trees_match
from tests.training.test_trainer import a_trainer, lines_of, trained

from .test_objective import a_batch, advantages_of, episodes, given_for, loss_of

MODULE = """
import jax.numpy as jnp
from groupax.objective.aggregation import seq_mean_token_mean, token_mean
from groupax.objective.ratios import k3
from groupax.objective.losses import Loss, ppo_clip_loss, ppo_clip_metrics


def gmpo_loss(terms, settings, epsilon=0.4):
    sign = jnp.sign(terms.advantage)
    log_ratio = sign * jnp.minimum(sign * terms.log_ratio, jnp.clip(sign * terms.log_ratio, -epsilon, epsilon))
    lengths = jnp.maximum(jnp.sum(terms.mask, axis=-1, keepdims=True), 1)
    mean = jnp.sum(log_ratio, axis=-1, keepdims=True, where=terms.mask) / lengths.astype(jnp.float32)
    return jnp.broadcast_to(-jnp.exp(mean) * terms.advantage, terms.mask.shape)


def gmpo_metrics(terms, settings, epsilon=0.4):
    return {"gmpo/clipped_frac": jnp.abs(terms.log_ratio) > epsilon}


def same_loss(terms, settings):
    return ppo_clip_loss(terms, settings)


def same_kl(logp, ref_logp):
    return k3(logp, ref_logp)


def same_advantages(rewards, weights, num_generations):
    scores = (rewards * weights).reshape(-1, num_generations)
    centred = scores - scores.mean(axis=1, keepdims=True)
    return (centred / (scores.std(axis=1, ddof=1, keepdims=True) + 1e-4)).reshape(-1)


def a_sum(terms, settings):
    return jnp.sum(terms.logp, axis=-1)


GMPO = Loss(gmpo_loss, seq_mean_token_mean, gmpo_metrics)
SAME = Loss(same_loss, token_mean, ppo_clip_metrics)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module `my_objective`, importable as a user's own."""
    (tmp_path / "my_objective.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import my_objective

    yield my_objective
    del sys.modules["my_objective"]


def numpy_gmpo(batch, epsilon):
    losses = []
    for logp, old, mask, A in zip(batch["logp"], batch["old_logp"], batch["mask"], batch["advantages"], strict=True):
        r = (logp - old)[mask].astype(np.float64)
        s = np.sign(A[mask])
        weight = np.exp(np.mean(s * np.minimum(s * r, np.clip(s * r, -epsilon, epsilon))))
        losses.append(np.mean(-weight * A[mask]))
    return np.mean(losses)


@pytest.mark.parametrize("make", [a_batch, episodes])
@pytest.mark.parametrize("epsilon", [0.4, 0.1])
def test_gmpo_as_an_own_loss_is_its_formula(own, epsilon, make):
    settings = ObjectiveSettings(loss_type=f"my_objective:GMPO(epsilon={epsilon})")
    batch = make()
    given = given_for(settings, batch)
    np.testing.assert_allclose(loss_of(given, settings), numpy_gmpo(batch, epsilon), rtol=2e-5)
    metrics = zero_metrics(settings)
    assert "gmpo/clipped_frac" in metrics.sums
    assert "clip_ratio/low_min" not in metrics.minima


def results(tmp_path, **settings):
    trainer = trained(tmp_path, num_iterations=2, beta=0.05, max_steps=2, **settings)
    return jax.device_get(trainer.learner.state.params), lines_of(tmp_path)


@pytest.mark.heavy
def test_a_loss_equal_to_a_built_in_trains_to_the_same_bits(tmp_path, own):
    weights, lines = results(tmp_path / "built_in", loss_type="dapo")
    references = {
        "loss_type": "my_objective:SAME",
        "kl_estimator": "my_objective:same_kl",
        "advantage_estimator": "my_objective:same_advantages",
    }
    functions = {
        "loss_type": Loss(lambda terms, settings: ppo_clip_loss(terms, settings), metrics=ppo_clip_metrics),
        "kl_estimator": lambda logp, ref_logp: k3(logp, ref_logp),
    }
    for name, settings in {"references": references, "functions": functions}.items():
        own_weights, own_lines = results(tmp_path / name, **settings)
        assert own_lines == lines
        assert_trees_match(weights, own_weights)


@pytest.mark.heavy
def test_an_own_loss_is_logged_stored_and_resumed(tmp_path, own):
    settings = {"loss_type": "my_objective:GMPO(epsilon=0.2)", "save_steps": 1, "max_steps": 2}
    a_trainer(tmp_path, **settings).train()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "my_objective:GMPO(epsilon=0.2)" in json.dumps(config)
    assert all("gmpo/clipped_frac" in line for line in lines_of(tmp_path))
    trained(tmp_path, **settings)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]
    record = functools.partial(find_loss("my_objective:GMPO").token_loss, epsilon=0.2)
    assert GRPOConfig(loss_type=record).to_dict()["loss_type"] == "my_objective:gmpo_loss(epsilon=0.2)"


def test_references_name_what_was_given(own):
    assert reference_to(own.GMPO) == "my_objective:GMPO"
    assert reference_to(own.gmpo_loss) == "my_objective:gmpo_loss"
    assert reference_to(find_loss("my_objective:gmpo_loss(epsilon=0.2)").token_loss) == (
        "my_objective:gmpo_loss(epsilon=0.2)"
    )
    unnamed = Loss(own.gmpo_loss, seq_mean_token_mean)
    assert str(unnamed) == "my_objective:gmpo_loss by groupax.objective.aggregation:seq_mean_token_mean"
    config = GRPOConfig(loss_type=own.GMPO, kl_estimator=own.same_kl)
    assert GRPOConfig.from_mapping(json.loads(json.dumps(config.to_dict()))).loss_type == "my_objective:GMPO"


def test_advantages_of_ones_own(own):
    rewards = [[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [np.nan, np.nan]] * 2
    found = advantages_of(rewards, [1.0, 2.0], estimator=lambda rewards, weights, num_generations: rewards @ weights)
    np.testing.assert_array_equal(found.values, [1.0, 4.0, 5.0, 0.0] * 2)  # no reward, no advantage
    for wrong in (lambda *_: np.zeros(3), lambda *_: np.full(8, np.inf)):
        with pytest.raises(ValueError, match="must return one finite number for each of the 8 rows"):
            advantages_of(rewards, estimator=wrong)
    with pytest.raises(ValueError, match="scale_rewards 'none' is for advantage_estimator 'grpo'"):
        GRPOConfig(advantage_estimator="my_objective:same_advantages", scale_rewards="none")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "grop"}, r"loss_type must be one of .*'module:function', got 'grop'; did you mean grpo"),
        ({"loss_type": "my_objective:gmpo_los"}, "no 'gmpo_los'; it has .*did you mean gmpo_loss"),
        ({"loss_type": "my_objectives:GMPO"}, "there is no module 'my_objectives'"),
        ({"loss_type": "my_objective.py:GMPO"}, "names a file; name the module, without .py: 'my_objective:GMPO'"),
        ({"loss_type": "my_objective:GMPO(epsilom=1)"}, "has no option 'epsilom'; it takes .*did you mean epsilon"),
        ({"loss_type": "my_objective:GMPO(0.2)"}, "options have names"),
        ({"loss_type": "my_objective:a_sum"}, r"must return a loss for each token, \[B, T\] = \[2, 3\], got \[2\]"),
        ({"loss_type": lambda terms: terms.logp}, r"is called with \(terms, settings\), but takes \(terms\)"),
        ({"loss_type": "my_objective:__name__"}, "must be a function of"),
        ({"kl_estimator": "k1"}, "kl_estimator must be one of k2, k3 or a function.*got 'k1'"),
        ({"kl_estimator": lambda logp, ref: jnp.sum(logp), "beta": 0.1}, "must return an estimate for each token"),
        ({"advantage_estimator": "grop"}, "did you mean grpo"),
        ({"advantage_estimator": "my_objective:nothing"}, "has no 'nothing'"),
        ({"advantage_estimator": lambda rewards: rewards}, r"is called with \(rewards, weights, num_generations\)"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(tmp_path, own, settings, message):
    with pytest.raises(ValueError, match=message):
        a_trainer(tmp_path, model="no/model", **settings)
