"""Environments of the library verifiers, which is an extra and not small: the tests skip where it is not installed."""

import importlib.util
import sys
import types

import pytest

from groupax import verifiers as load
from groupax.core.errors import RunError
from groupax.core.settings.sampling import SamplingParams

from .test_episodes import check_five_steps, played

if importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("verifiers.envs") is None:
    pytest.skip("verifiers<0.4 is not installed", allow_module_level=True)

import verifiers as vf
from datasets import Dataset

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TWO = SamplingParams(n=2, max_tokens=2000)
QUESTIONS = Dataset.from_list(
    [{"question": f"Say {letter} often.", "answer": letter, "info": {"level": 1}} for letter in "aeio"]
)


def often(completion, answer, **_):
    """The occurrences of a letter in what the model wrote."""
    return sum(str(each.content).count(answer) for each in completion if each.role == "assistant") / 10


class Talk(vf.MultiTurnEnv):
    """Answers three turns."""

    async def setup_state(self, state):
        state["heard"] = []
        if self.fails_at == "setup":
            raise vf.InfraError("no machine")
        return state

    async def env_response(self, messages, state, **_):
        state["heard"].append(messages[-1].content)
        if self.fails_at == "turn":
            raise vf.InfraError("no machine")
        return [{"role": "user", "content": f"{len(state['heard'])}?"}]

    @vf.stop
    async def is_tired(self, state):
        return len(state["trajectory"]) == 3

    @vf.cleanup
    async def forget(self, state):
        self.cleaned += 1


def talk(fails_at="", **settings):
    return Talk(dataset=QUESTIONS, rubric=vf.Rubric([often]), fails_at=fails_at, cleaned=0, **settings)


def example(environment, index=0):
    return {key: value for key, value in environment.dataset[index].items() if key != "prompt"}


def test_an_environment_plays_and_scores_a_rollout():
    inner = talk(system_prompt="Be brief.")
    environment = load(inner, name="talk")
    assert environment.dataset[1] == {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say e often."}],
        "answer": "e",
        "verifiers_row": "train/1",
    }

    def answer(text, sample, turn):
        return "a" * (turn + 1) if sample else "b"

    [[none, some]], _ = played(answer, environments=environment, params=TWO, example=example(environment))
    assert (none.finish_reason, none.environment_reward) == ("done", 0.0)
    assert (some.finish_reason, some.environment_reward) == ("done", pytest.approx(0.6))
    assert [message["content"] for message in some.completion] == ["a", "1?", "aa", "2?", "aaa"]
    assert inner.cleaned == 2


def test_a_limit_of_the_run_ends_the_rollout_which_is_scored():
    environment = load(talk())

    def answer(text, sample, turn):
        return "a" * (30 if sample and turn else 10)

    settings = {"environments": environment, "example": example(environment), "params": TWO}
    [[row, cut]], _ = played(answer, max_turn_tokens=20, **settings)
    assert (row.finish_reason, row.environment_reward) == ("done", pytest.approx(3.0))
    assert cut.finish_reason == "turn_length"
    assert cut.environment_reward == pytest.approx((10 + len(cut.turns[1].text)) / 10)
    [[row, _]], _ = played(answer, max_turns=2, **settings)
    assert (row.finish_reason, row.environment_reward) == ("max_turns", pytest.approx(2.0))


def test_a_failure_of_infrastructure_leaves_the_episode_out():
    environment = load(talk("turn"))
    with pytest.warns(UserWarning, match="rollout failed: InfraError"):
        [[row, _]], _ = played(lambda *_: "a", environments=environment, params=TWO, example=example(environment))
    assert (row.finish_reason, row.environment_reward) == ("env_error", None)
    environment = load(talk("setup"))
    with pytest.warns(UserWarning, match="before the first turn"), pytest.raises(RunError, match="no machine"):
        played(lambda *_: "a", environments=environment, params=TWO, example=example(environment))


def test_training_on_a_verifiers_environment(tmp_path, monkeypatch):
    module = types.ModuleType("talkative")
    module.load_environment = lambda max_turns=-1: talk(max_turns=max_turns)
    monkeypatch.setitem(sys.modules, "talkative", module)
    environment = load("talkative", name="talk", max_turns=2)
    check_five_steps(tmp_path, environment.dataset, environment)
