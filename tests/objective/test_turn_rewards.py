"""Rewards per turn, episodes that are left out, and the leave-one-out baseline of RLOO."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest

from groupax.compat import trl
from groupax.core.settings.objective import ObjectiveSettings
from groupax.core.settings.rollouts import RewardSettings
from groupax.core.types import FAILURES
from groupax.events import RolloutScored, StepEnded
from groupax.objective.advantages import (
    find_advantage_estimator,
    group_advantages,
    rloo,
)
from groupax.objective.aggregation import Denominators
from groupax.objective.losses import LossInputs, policy_objective
from groupax.rewards.contract import checked_scores, reward_matrix
from groupax.rewards.resolve import resolve_rewards
from groupax.rewards.runner import RewardRunner
from groupax.rollouts.completions import completion_metrics, episode_metrics, reward_metrics
from tests.compat.conftest import folder  # noqa: F401 - a fixture
from tests.episodes.test_episodes import Conversation, train
from tests.episodes.test_turns import an_episode, one_turn
from tests.training.test_trainer import PROMPTS, a_trainer, trained

NAN = float("nan")
EPISODES = [3.5, 0.5, 1.5, 3.0, 3.0, 1.25]  # rewards of two groups of three


@pytest.mark.parametrize(
    "settings",
    [
        {"scale": "group"},
        {"scale": "batch"},
        {"scale": "none"},
        {"aggregation": "normalize_then_sum"},
        {"estimator": rloo},
    ],
    ids=lambda changes: str({name: getattr(value, "__name__", value) for name, value in changes.items()}),
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_episode_that_is_left_out_leaves_the_others_as_if_it_had_never_been(settings):
    def advantages(episodes, G):
        return group_advantages(np.array(episodes)[:, None], np.ones(1), G, **settings)

    without = advantages(EPISODES, 3)
    found = advantages([*EPISODES[:2], NAN, *EPISODES[2:5], NAN, EPISODES[5]], 4)
    is_missing = np.arange(8) % 4 == 2
    np.testing.assert_allclose(found.values[~is_missing], without.values, rtol=1e-12)
    assert not found.values[is_missing].any()
    np.testing.assert_allclose(found.group_std, without.group_std)
    assert np.isnan(found.rewards).tolist() == [False, False, True, False] * 2
    single = advantages([3.0, NAN, NAN], 3)
    assert single.zero_std.tolist() == [True]
    assert "estimator" in settings or not single.values.any()


def test_failures_count_in_no_metric_but_their_own():
    others = [an_episode(0, finish_reason="max_turns"), an_episode(1), one_turn(2)]
    for reason in FAILURES:
        lost = an_episode(3, finish_reason=reason, rewards={"right": None, "other": None})
        with_it, without = episode_metrics([*others, lost]), episode_metrics(others)
        same = {name for name in without if not name.startswith("stop/")}
        assert {name: with_it[name] for name in same} == {name: without[name] for name in same}
        assert with_it[f"stop/{reason}"] == 0.25
        assert with_it["stop/max_turns"] == 0.25
        assert without["stop/max_turns"] == pytest.approx(1 / 3)
    names = "stop done length turn_length max_turns max_tool_calls tool_result_too_long parse_error timeout env_error"
    assert {name for name in without if name.startswith("stop/")} == {f"stop/{name}" for name in names.split()}
    assert all(np.isnan(value) for value in completion_metrics([]).values())
    assert completion_metrics([]).keys() == completion_metrics(others).keys()


# -- rewards per turn


def turns_judged(turns):
    return [[float(len(turn.calls)) for turn in own] for own in turns]


def scored_by(functions, rollouts, **settings):
    with RewardRunner(resolve_rewards(functions, ["prompt"]), RewardSettings(**settings)) as runner:
        scored = runner.score([rollouts])
    return scored.groups[0], scored


@pytest.mark.parametrize("settings", [{}, {"reward_scope": "rollout"}])
def test_a_reward_function_may_return_a_list_for_the_turns_of_a_completion(settings):
    def one(turns):
        return [[0.5] * len(own) if len(own) > 1 else 3 for own in turns]

    def whole(completions):
        return [1.0, None]

    rollouts = [an_episode(rewards={}), replace(one_turn(), rewards={})]
    group, scored = scored_by([turns_judged, one, whole], rollouts, **settings)
    assert not any(scored.errors.values())
    assert group[0].rewards == {"turns_judged": 2.0, "one": 1.5, "whole": 1.0}
    assert group[1].rewards == {"turns_judged": 0.0, "one": 3.0, "whole": None}
    assert [dict(turn.rewards) for turn in group[0].turns] == [
        {"turns_judged": 0.0, "one": 0.5},
        {"turns_judged": 1.0, "one": 0.5},
        {"turns_judged": 1.0, "one": 0.5},
    ]
    names = ["turns_judged", "one", "whole"]
    # once per completion, not once per turn
    matrix = reward_matrix(names, group)
    metrics = reward_metrics(names, matrix, group_advantages(matrix, np.ones(3), 2))
    assert metrics["rewards/turns_judged/mean"] == 1.0
    assert metrics["reward"] == pytest.approx((4.5 + 3) / 2)


def test_a_list_of_rewards_that_does_not_fit_the_turns_is_a_failure():
    rollouts = [an_episode(), one_turn()]
    scores = checked_scores("f", [[1.0, 2.0], 1.0], rollouts)
    assert scores.num_failures == 1
    assert (
        "'f' returned a list of 2 for completion 0 ('the whole'), which has 3 turns; return one number" in scores.error
    )
    assert np.isnan(scores.values[0])
    assert scores.by_turn == [None, None]
    for bad in ([1.0, float("nan"), 0.0], [1.0, None, 0.0], [1.0, "2", 0.0], [1.0, [2.0], 0.0]):
        scores = checked_scores("f", [bad, np.array([0.25])], rollouts)
        assert "return a finite number" in scores.error
        assert scores.by_turn == [None, (0.25,)]
        assert scores.values[1] == 0.25


# -- runs


class Flaky(Conversation):
    """A conversation that breaks off: always about dogs, and where the first answer is short about cats."""

    def reset(self, row, seed):
        self.topic = row["topic"]
        return super().reset(row, seed)

    def act(self, message):
        if self.topic == "dogs" or len(message["content"]) < 6:
            raise OSError("gone")
        return super().act(message)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:environment 'Flaky'")
def test_a_run_goes_on_without_the_episodes_whose_environments_fail(tmp_path):
    settings = {"filter_zero_variance": True, "filter_budget": 3.0, "max_steps": 2, "masked_rows_in_denominator": True}
    lines, _ = train(tmp_path / "run", environments=Flaky, loss_type="grpo", **settings)
    rows = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / "step_000001.parquet").to_pylist()
    failed = np.array([row["finish_reason"] == "env_error" for row in rows])
    rewards = np.array([row["rewards/Flaky"] for row in rows], float)
    assert np.isnan(rewards).tolist() == failed.tolist()
    assert 0 < failed[:4].sum() < 3  # of a group whose others are compared
    known, first = rewards[~failed], rewards[:4][~failed[:4]]
    line, lengths = lines[0], [sum(row["mask"]) for row in rows]
    assert line["stop/env_error"] == pytest.approx(failed.mean())
    assert line["filter/sampled_prompts"] > 2  # in place of groups that have failed
    assert [line["reward"], line["reward_std"]] == pytest.approx([known.mean(), known.std(ddof=1)])
    assert line["rewards/unscorable_frac"] == 0
    assert line["completions/mean_length"] == pytest.approx(np.array(lengths)[~failed].mean())
    assert line["loss_tokens"] == np.array(lengths[:8])[~failed[:8]].sum()
    expected = np.zeros(4)
    expected[~failed[:4]] = (first - first.mean()) / (first.std(ddof=1) + 1e-4)
    np.testing.assert_allclose([row["advantage"] for row in rows[:4]], expected, rtol=1e-5)
    assert all(np.isfinite(line["loss"]) for line in lines)


# -- the leave-one-out baseline


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


@pytest.mark.heavy
def test_the_kl_of_a_completion_is_subtracted_from_its_reward(tmp_path):
    seen = []
    settings = {"use_kl_in_reward": True, "beta": 0.5, "advantage_estimator": "rloo", "max_steps": 2}
    trainer = a_trainer(tmp_path, reward_clip_range=(0.0, 0.2), **settings)
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
    whole = trained(tmp_path / "whole", **settings)
    stopped = a_trainer(tmp_path / "parts", **settings)
    stopped.listeners = [lambda event: isinstance(event, StepEnded) and event.step == 5]
    stopped.train()
    assert stopped.cursor.step == 5
    again = trained(tmp_path / "parts", **settings)
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
