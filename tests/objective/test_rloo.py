"""RLOO: the leave-one-out baseline, ratios of whole completions, the KL in the reward; and TRL's `RLOOTrainer`."""

import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax.compat import trl
from groupax.config import GRPOConfig
from groupax.events import RolloutScored, StepEnded
from groupax.objective.advantages import clipped_sum, find_advantage_estimator, rloo, with_penalty
from groupax.objective.aggregation import Denominators
from groupax.objective.objective import LossInputs, policy_objective
from groupax.settings.objective import ObjectiveSettings
from tests.compat.test_compat import folder  # noqa: F401 - a fixture
from tests.training.test_trainer import PROMPTS, a_trainer

NAN = float("nan")


def test_a_completion_is_compared_with_the_others_of_its_group():
    rewards = np.array([[1.0, 0.0], [2.0, NAN], [4.0, 3.0], [NAN, NAN], [5.0, NAN], [5.0, NAN], [5.0, 9.0], [NAN, NAN]])
    weights = np.array([1.0, 0.5])
    expected = [1 - 3 - 1.5, 2 - 2.5, 4 - 1.5 + 1.5, 0, 0, 0, 0, 0]
    assert find_advantage_estimator("rloo") is rloo
    np.testing.assert_allclose(rloo(rewards, weights, 4), expected, atol=1e-12)
    normalized = rloo(rewards, weights, 4, normalize=True)
    known = np.delete(expected, [3, 7])
    scaled = (known - known.mean()) / (known.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(np.delete(normalized, [3, 7]), scaled, atol=1e-12)
    assert normalized[3] == normalized[7] == 0


def test_sums_are_clipped_before_the_penalty():
    rewards = np.array([[1.0, 5.0], [NAN, -3.0], [NAN, NAN]])
    clipped = clipped_sum(rewards, np.array([1.0, 2.0]), -1.0, 4.0)
    np.testing.assert_array_equal(clipped, [[4.0], [-1.0], [NAN]])
    np.testing.assert_array_equal(
        with_penalty(clipped, np.array([0.5, 0.25, 1.0])), [[4, -0.5], [-1, -0.25], [NAN] * 2]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_kl_in_reward": True}, "use_kl_in_reward needs a reference, and beta is 0"),
        ({"reward_clip_range": (1.0, 1.0)}, "a lower and a higher number"),
        ({"reward_clip_range": (0.0, 1.0), "multi_objective_aggregation": "normalize_then_sum"}, "clips the sum"),
        ({"reward_clip_range": (0.0, 1.0), "turn_credit": "returns"}, "set reward_clip_range to None"),
        ({"use_kl_in_reward": True, "beta": 0.1, "turn_credit": "returns"}, "turn_credit 'returns' does not use"),
        ({"importance_sampling_level": "sequence_sum", "turn_credit": "returns"}, "undoes turn_credit"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**settings)


@pytest.mark.heavy
def test_the_kl_of_a_completion_is_subtracted_from_its_reward(tmp_path):
    seen = []
    settings = {"use_kl_in_reward": True, "beta": 0.5, "advantage_estimator": "rloo", "max_steps": 2}
    trainer = a_trainer(tmp_path, reward_clip_range=(0.0, 0.2), weight_distribution_log_steps=0, **settings)
    trainer.listeners = [lambda event: seen.append(event) if isinstance(event, RolloutScored) else None]
    trainer.train()
    groups, metrics = seen[-1].groups, seen[-1].metrics
    rows = [row for rows in trainer.collector.cut(groups) for row in rows]
    with trainer.learner.reference_on_devices() as reference:
        logps = trainer.learner.logprobs(reference, rows)[0]
    kl = [float((row.rollout_logp - logp)[row.mask].sum()) for row, logp in zip(rows, logps, strict=True)]
    assert metrics["kl"] == pytest.approx(sum(kl) / sum(row.mask.sum() for row in rows), rel=1e-5)
    assert max(map(abs, kl)) > 1e-3
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [
        float(np.clip(rollout.rewards["count_a"], 0.0, 0.2)) - 0.5 * k for rollout, k in zip(rollouts, kl, strict=True)
    ]
    expected = rloo(np.array(rewards)[:, None], np.ones(1), 4)
    np.testing.assert_allclose([rollout.advantage for rollout in rollouts], expected, atol=1e-5)
    np.testing.assert_allclose([row.advantages[row.mask][0] for row in rows], expected, atol=1e-5)
    assert metrics["reward"] == pytest.approx(np.mean([rollout.rewards["count_a"] for rollout in rollouts]))


@pytest.mark.drawn(4, "resume")
@pytest.mark.heavy
def test_a_run_stopped_between_updates_on_a_rollout_ends_as_if_it_was_not(tmp_path):
    settings = {"use_kl_in_reward": True, "beta": 0.5, "advantage_estimator": "rloo", "max_steps": 8}
    settings |= {"importance_sampling_level": "sequence_sum", "loss_type": "grpo", "save_steps": 1}
    settings |= {"updates_per_rollout": 2, "num_iterations": 2, "prompts_per_step": 2}
    whole = a_trainer(tmp_path / "whole", **settings)
    whole.train()
    stopped = a_trainer(tmp_path / "parts", **settings)
    stopped.listeners = [lambda event: isinstance(event, StepEnded) and event.step == 5]
    stopped.train()
    assert stopped.cursor.step == 5
    again = a_trainer(tmp_path / "parts", **settings)
    again.train()
    jax.tree.map(np.testing.assert_array_equal, again.learner.state.params, whole.learner.state.params)


@pytest.mark.heavy
@pytest.mark.filterwarnings("default")
def test_trls_trainer_trains(folder, tmp_path):  # noqa: F811
    args = trl.RLOOConfig(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        max_completion_length=4,
        reward_clip_range=[-1.0, 1.0],
    )
    trainer = trl.RLOOTrainer(str(folder), lambda completions, **_: [len(c) for c in completions], args, PROMPTS)
    trainer.train()
    native = trainer.native.args
    assert (native.advantage_estimator, native.use_kl_in_reward, native.beta) == ("rloo", True, 0.05)
    assert (native.loss_type, native.importance_sampling_level) == ("grpo", "sequence_sum")
    assert native.reward_clip_range == (-1.0, 1.0)
    assert all("kl" in line for line in trainer.state.log_history if "reward" in line)
    normalized = trl.RLOOConfig(normalize_advantages=True, beta=0.0).to_native()
    assert normalized.advantage_estimator == "groupax.objective.advantages:rloo(normalize=True)"
    assert not normalized.use_kl_in_reward
    with pytest.raises(TypeError, match="RLOOConfig has no field 'loss_type'"):
        trl.RLOOConfig(loss_type="grpo")


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_arguments_are_trls():
    theirs = pytest.importorskip("trl")
    arguments = inspect.signature(theirs.RLOOTrainer.__init__).parameters
    assert arguments.keys() <= inspect.signature(trl.RLOOTrainer.__init__).parameters.keys()


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_loss_and_gradient_are_trls():
    torch, theirs = pytest.importorskip("torch"), pytest.importorskip("trl")
    draw = np.random.default_rng(0)
    mask = np.arange(7)[None] < np.array([7, 3, 5, 1])[:, None]
    logp, entropy = (draw.normal(-2.0, 0.5, mask.shape).astype(np.float32) for _ in range(2))
    old = (logp + draw.normal(0.0, 0.05, mask.shape)).astype(np.float32)
    advantages = np.array([1.0, -0.5, 0.25, -0.75], np.float32)
    settings = ObjectiveSettings(loss_type="grpo", importance_sampling_level="sequence_sum", epsilon=0.1)
    wide = jnp.asarray(np.where(mask, advantages[:, None], 0.0))
    inputs = LossInputs(wide, jnp.asarray(mask), jnp.asarray(old), jnp.asarray(old))
    counts = Denominators(jnp.float32(4), jnp.float32(mask.sum()))

    def loss_of(logp):
        return policy_objective(logp, jnp.asarray(entropy), inputs, counts, settings)[0]

    loss, grad = jax.value_and_grad(loss_of)(jnp.asarray(logp))
    scored = torch.tensor(logp, requires_grad=True)
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (scored, torch.tensor(entropy), None),
        aux_loss_enabled=False,
        epsilon_low=0.1,
        epsilon_high=0.1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": {name: [] for name in ("entropy", *(f"clip_ratio/{each}" for each in CLIP))}},
    )
    kept = torch.tensor(mask).int()
    batch = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), kept)
    batch |= {"old_logps": torch.tensor((old * mask).sum(1)), "advantages": torch.tensor(advantages)}
    expected = theirs.RLOOTrainer._compute_loss(stand_in, None, batch)
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), atol=1e-6)
    np.testing.assert_allclose(grad, scored.grad.numpy(), atol=1e-6)


CLIP = ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
