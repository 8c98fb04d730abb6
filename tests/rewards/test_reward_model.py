"""Reward models: sequence classifiers as rewards (their numbers are checked against transformers in test_parity)."""

import jax
import numpy as np
import pytest

from groupax import init_model, load_model, save_model
from groupax.core.settings.rollouts import RewardSettings
from groupax.rewards.model import RewardModel
from groupax.rewards.resolve import resolve_rewards
from groupax.rewards.runner import RewardRunner
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.training.test_trainer import a_trainer, count_a, lines_of

from .test_rewards import rollouts_of

CONFIG = {
    **TINY,
    "vocab_size": 13,
    "architectures": ["LlamaForSequenceClassification"],
    "num_labels": 1,
    "id2label": {"0": "reward"},
}


def a_reward_model(folder):
    model = init_model(CONFIG, seed=1)
    params = {**model.params, "score": 100.0 * model.params["score"]}
    return save_model(
        type(model)(model.config, params, model.mesh, model.hf_config, {}), folder, a_tokenizer(eos_token="<eos>")
    )


def test_scores_do_not_depend_on_what_they_are_batched_with(tmp_path, monkeypatch):
    model = RewardModel(a_reward_model(tmp_path / "judge"))
    rows = rollouts_of(["abc", "b", "cab" * 20, "hig" * 7, "a"] * 3)
    assert np.isnan(model.rewards(rollouts_of(["abc" * 200, "abc"]))).tolist() == [True, False]  # beyond its positions
    together = model.rewards(rows)
    alone = [model.rewards([row])[0] for row in rows]
    monkeypatch.setattr("groupax.rewards.model.MICRO_BATCH_TOKENS", 128)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(model.rewards(rows), together, atol=1e-5)
    assert np.ptp(together) > 0.1


def test_conversations_go_through_its_own_template(tmp_path):
    tokenizer = a_tokenizer(eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    folder = a_reward_model(tmp_path / "judge")
    model = RewardModel(folder, tokenizer)
    np.testing.assert_allclose(
        model.rewards(rollouts_of(["abc"], conversational=True)), model.rewards(rollouts_of(["abc"])), atol=1e-6
    )
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        RewardModel(folder).rewards(rollouts_of(["abc"], conversational=True))


@pytest.mark.heavy
def test_models_and_functions_mix_and_keep_their_places(tmp_path):
    folder = a_reward_model(tmp_path / "judge")
    for given in (str(folder), folder, RewardModel(folder)):
        rewards = resolve_rewards([count_a, given], [])
        assert [reward.name for reward in rewards] == ["count_a", "judge"]
        rows = rollouts_of(["abc", "b"])
        with RewardRunner(rewards, RewardSettings()) as runner:
            runner.start(rows[:1])
            runner.start(rows[1:])
            scores = runner.finish()
        expected = RewardModel(folder).rewards(rows)
        np.testing.assert_allclose([group[1].values[0] for group in scores], expected, atol=1e-5)
        assert [group[0].values[0] for group in scores] == [0.0, 0.0]


@pytest.mark.drawn(2, "learns")
@pytest.mark.heavy
def test_it_trains_towards_a_reward_model(tmp_path):
    folder = a_reward_model(tmp_path / "judge")
    a_trainer(tmp_path, str(folder), max_steps=25).train()
    lines = lines_of(tmp_path)
    assert lines[-1]["rewards/judge/mean"] > lines[0]["rewards/judge/mean"] + 0.5
    assert lines[-1]["rewards/judge/failures"] == 0


@pytest.mark.heavy
def test_models_in_memory_need_a_tokenizer(tmp_path):
    model = load_model(a_reward_model(tmp_path / "judge"))
    [reward] = resolve_rewards(model, [], a_tokenizer(eos_token="<eos>"))
    assert reward.name == "reward_model"
    with pytest.raises(ValueError, match="created in memory has no tokenizer"):
        resolve_rewards(init_model(CONFIG), [])
    with pytest.raises(ValueError, match="reward_processing_classes has 1 entries for 2 reward functions"):
        resolve_rewards([model, count_a], [], [None])


@pytest.mark.heavy
def test_the_wrong_kind_of_model_is_refused(tmp_path):
    causal = save_model(init_model(TINY), tmp_path / "causal")
    with pytest.raises(ValueError, match=r"is not a reward model: its config.json names"):
        RewardModel(causal)
    with pytest.raises(ValueError, match="classifies sequences; a policy needs a causal model"):
        a_trainer(tmp_path, model=init_model(CONFIG))
    assert "score" in jax.tree.map(np.shape, init_model(CONFIG).params)
