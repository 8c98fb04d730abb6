"""Credit of turns, rewards per turn and the leave-one-out baseline: exact gradients, and episodes that count once."""

import itertools
import json
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
from groupax.core.types import FAILURES, Rollout, Turn
from groupax.events import RolloutScored, StepEnded
from groupax.objective.advantages import (
    find_advantage_estimator,
    group_advantages,
    rloo,
)
from groupax.objective.aggregation import Denominators
from groupax.objective.losses import LossInputs, policy_objective
from groupax.objective.turn_credit import return_advantages
from groupax.rewards.contract import checked_scores, reward_matrix, turn_reward_matrices
from groupax.rewards.resolve import resolve_rewards
from groupax.rewards.runner import RewardRunner
from groupax.rollouts.completions import completion_metrics, episode_metrics, reward_metrics
from groupax.rollouts.state import row_of
from tests.compat.conftest import folder  # noqa: F401 - a fixture
from tests.episodes.test_episodes import Conversation, train
from tests.episodes.test_turns import an_episode, one_turn
from tests.training.test_trainer import PROMPTS, a_trainer, trained

# A game of one or two turns: at first the model ends it, or goes to one of two places, where it has two choices. Each
# episode has its actions, as indices into the logits of its states, and a reward for each turn.
GAME = [
    (((0, 3),), (0.3,)),
    (((1, 3), (0, 2)), (1.0, -0.7)),
    (((1, 3), (1, 2)), (1.0, 2.0)),
    (((2, 3), (0, 2)), (-0.5, 0.4)),
    (((2, 3), (1, 2)), (-0.5, 1.9)),
]
STATES = [(0,), (0, 1), (0, 1), (0, 2), (0, 2)]  # which of the policies below acts in each turn
LOGITS = [np.array([0.4, -0.3, 0.1]), np.array([0.2, -0.9]), np.array([-0.5, 0.6])]
SIZES = [0, 3, 5, 7]


def log_policy(logits):
    """The probabilities of the episodes, and the gradient of each turn's log-prob by all logits."""
    soft = [np.exp(z) / np.exp(z).sum() for z in logits]
    probabilities, slopes = [], []
    for (actions, _), states in zip(GAME, STATES, strict=True):
        probabilities.append(np.prod([soft[s][a] for s, (a, _) in zip(states, actions, strict=True)]))
        own = np.zeros((len(actions), SIZES[-1]))
        for t, (s, (a, n)) in enumerate(zip(states, actions, strict=True)):
            own[t, SIZES[s] : SIZES[s + 1]] = np.eye(n)[a] - soft[s]
        slopes.append(own)
    return np.array(probabilities), slopes


def exact_gradient(discount=1.0):
    """Sum over episodes and turns of p times the discounted rewards from the turn on times grad log pi of the turn."""
    probabilities, slopes = log_policy(LOGITS)
    total = np.zeros(SIZES[-1])
    for p, slope, (_, rewards) in zip(probabilities, slopes, GAME, strict=True):
        for t in range(len(rewards)):
            total += p * sum(discount ** (u - t) * rewards[u] for u in range(t, len(rewards))) * slope[t]
    return total


@pytest.mark.parametrize("discount", [1.0, 0.6])
def test_the_gradient_of_the_loss_is_the_exact_policy_gradient(discount):
    def episode(index, sample):
        num_turns, end = len(GAME[index][1]), 2 * len(GAME[index][1]) - 1
        ids, mask = np.zeros(end, np.int32), np.arange(end) % 2 == 0  # a token for each turn, one of the environment
        turns = tuple(Turn(2 * t, 2 * t + 1, "", rewards={"r": GAME[index][1][t]}) for t in range(num_turns))
        zeros, rewards = np.zeros(end, np.float32), {"r": sum(GAME[index][1])}
        given = {"prompt": ""}, ids[:1], ids, zeros, zeros, "done", 0, ""
        return Rollout(0, sample, *given, rewards=rewards, mask=mask, turns=turns)

    G, T = 3, 3
    settings = ObjectiveSettings(loss_type="dr_grpo", max_completion_length=T)
    groups = list(itertools.product(range(len(GAME)), repeat=G))
    advantages, masks = np.zeros((2, len(groups), G, T))
    for number, group in enumerate(groups):
        rollouts = [episode(index, sample) for sample, index in enumerate(group)]
        found = return_advantages(turn_reward_matrices(["r"], rollouts), np.ones(1), G, "none", discount)
        for i, (rollout, turns) in enumerate(zip(rollouts, found.turns, strict=True)):
            row = row_of(replace(rollout, turn_advantages=tuple(turns.tolist())), 0, (), False)
            advantages[number, i, : len(row.mask)], masks[number, i, : len(row.mask)] = row.advantages, row.mask

    def loss(logits, group, A, mask):
        table = jnp.zeros((len(GAME), T))  # log-probs of the tokens of each episode
        logps = [jax.nn.log_softmax(z) for z in logits]
        for index, ((actions, _), states) in enumerate(zip(GAME, STATES, strict=True)):
            for t, (state, (action, _)) in enumerate(zip(states, actions, strict=True)):
                table = table.at[index, 2 * t].set(logps[state][action])
        logp, zeros = table[group], jnp.zeros((G, T))
        counts = Denominators(jnp.float32(G), jnp.float32(1))
        return policy_objective(logp, zeros, LossInputs(A, mask, zeros), counts, settings)[0]

    logits = [jnp.asarray(z, jnp.float32) for z in LOGITS]
    given = jnp.asarray(groups), jnp.asarray(advantages, jnp.float32), jnp.asarray(masks > 0)
    slopes = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0, 0)))(logits, *given)
    weights = np.array([np.prod(log_policy(LOGITS)[0][list(group)]) for group in groups])
    # dr_grpo divides by the longest completion
    mean = -T * np.concatenate([np.einsum("n,nz->z", weights, np.asarray(slope, np.float64)) for slope in slopes])
    np.testing.assert_allclose(mean, exact_gradient(discount), atol=1e-6)


def rows_of(*rewards):
    return [np.array(row, np.float64).reshape(len(row), -1) for row in rewards]


def test_a_group_teaches_something_if_its_turns_differ():
    found = return_advantages(rows_of([1, 0], [0, 1]), np.ones(1), 2)
    assert not found.zero_std[0]
    np.testing.assert_allclose(found.turns, [[0, -2], [0, 2]], rtol=1e-3)
    for nothing in (rows_of([0.1, 0.2], [0.1, 0.2]), rows_of([0.1], [0.1]), rows_of([3], [np.nan])):
        for scale in ("group", "batch", "none"):
            found = return_advantages(nothing, np.ones(1), 2, scale)
            assert found.zero_std.tolist() == [True]
            assert not np.concatenate(found.turns).any()


EPISODES = [(1, 2.5), (0.5,), (0, 0, 1.5), (2, 1), (0, 3), (1.25,)]  # rewards per turn of two groups of three


@pytest.mark.parametrize(
    "settings",
    [
        {"scale": "group"},
        {"scale": "batch"},
        {"scale": "none"},
        {"aggregation": "normalize_then_sum"},
        {"estimator": rloo},
        {"credit": "returns", "scale": "group"},
        {"credit": "returns", "scale": "batch"},
        {"credit": "returns", "scale": "none", "discount": 0.9},
    ],
    ids=lambda changes: str({name: getattr(value, "__name__", value) for name, value in changes.items()}),
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_episode_that_is_left_out_leaves_the_others_as_if_it_had_never_been(settings):
    def advantages(episodes, G):
        rows, weights = rows_of(*episodes), np.ones(1)
        if "credit" in settings:
            given = {name: value for name, value in settings.items() if name != "credit"}
            found = return_advantages(rows, weights, G, **given)
            return found, np.concatenate(found.turns)
        totals = np.array([row.sum(axis=0) for row in rows])
        found = group_advantages(totals, weights, G, **settings)
        return found, found.values

    without, expected = advantages(EPISODES, 3)
    missing = (np.nan, np.nan)
    found, values = advantages([*EPISODES[:2], missing, *EPISODES[2:5], missing, EPISODES[5]], 4)
    num_turns = [
        1 if found.turns is None else len(row) for row in (*EPISODES[:2], missing, *EPISODES[2:5], missing, (0,))
    ]
    is_missing = np.repeat(np.arange(8) % 4 == 2, num_turns)
    np.testing.assert_allclose(values[~is_missing], expected, rtol=1e-12)
    assert not values[is_missing].any()
    np.testing.assert_allclose(found.group_std, without.group_std)
    assert np.isnan(found.rewards).tolist() == [False, False, True, False] * 2
    single, values = advantages([(1, 2), missing, missing], 3)
    assert single.zero_std.tolist() == [True]
    assert "estimator" in settings or not values.any()


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
    first, second = turn_reward_matrices(names, group)
    assert first.tolist() == [[0, 0.5, 0], [1, 0.5, 0], [1, 0.5, 1]]
    assert second[0, :2].tolist() == [0, 3]
    assert np.isnan(second[0, 2])
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


@pytest.mark.heavy
def test_training_by_returns_gives_each_turn_its_own_advantage(tmp_path):
    def brief(turns):
        return [[-len(turn.text) / 40 for turn in own] for own in turns]

    lines, _ = train(
        tmp_path / "run",
        reward_funcs=brief,
        turn_credit="returns",
        turn_discount=0.9,
        scale_rewards="none",
        filter_zero_variance=True,
        mask_truncated_completions=["length", "turn_length"],
        max_steps=2,
    )
    rows = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / "step_000001.parquet").to_pylist()
    turns = [json.loads(row["turns"]) for row in rows]
    names = ["brief", "Conversation"]
    given = [np.array([[turn["rewards"][name] for name in names] for turn in own]) for own in turns]
    expected = return_advantages(given[:8], np.ones(2), 4, "none", 0.9)
    for row, own, matrix, values in zip(rows, turns, given, expected.turns, strict=False):
        np.testing.assert_allclose(row["turn_advantages"], values, rtol=1e-5)
        assert row["advantage"] == pytest.approx(values[0], rel=1e-5)
        np.testing.assert_allclose([row["rewards/brief"], row["rewards/Conversation"]], matrix.sum(axis=0))
        assert [turn["reward"] for turn in own] == matrix[:, 1].tolist()
    assert len({len(own) for own in turns}) > 1
    assert lines[0]["reward"] == pytest.approx(np.mean([matrix.sum() for matrix in given]), rel=1e-6)
    masked = [row["finish_reason"] in ("length", "turn_length") for row in rows]
    assert 0 < sum(masked[:8]) < 8
    sampled = [sum(row["mask"]) for row in rows]
    assert lines[0]["loss_tokens"] == sum(n for n, is_masked in zip(sampled[:8], masked, strict=False) if not is_masked)
    assert sum(value for name, value in lines[0].items() if name.startswith("stop/")) == pytest.approx(1)


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
