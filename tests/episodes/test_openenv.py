"""Environments of OpenEnv servers: a small one that speaks as the package's own."""

import json
import time

import pytest

from groupax import InfrastructureError, openenv
from groupax.core.errors import RunError
from groupax.core.settings.sampling import SamplingParams

from .openenv_small import SmallServer
from .test_episodes import PROMPT, call, check_five_steps, played

TWO = SamplingParams(n=2, max_tokens=2000)


def texts(row):
    return [message["content"] for message in row.completion]


def test_an_environment_answers_texts_with_rewards():
    def answer(text, sample, turn):
        return "aeiou" if sample else "no"

    with SmallServer("words") as server:
        environment = openenv(server.url, name="words", reset_columns=["topic"])
        [group], _ = played(answer, environments=environment, params=TWO, example={"topic": "cats"})
        last = openenv(server.url, rewards="last")
        [[_, row]], _ = played(answer, environments=last, params=TWO)
        assert row.environment_reward == 0.1
    assert [row.finish_reason for row in group] == ["done", "done"]
    assert group[0].example["prompt"][-1]["content"] in [f"go Say {letter} (cats)." for letter in "aeiou"]
    assert [row.environment_reward for row in group] == [0.0, pytest.approx(0.3)]
    assert [turn.reward for turn in group[1].turns] == [0.1] * 3
    assert texts(group[0])[1].startswith("Again, ")


def test_tools_of_an_environment_are_tools_of_the_model():
    def answer(text, sample, turn):
        calls = [call("multiply", a=6, b=7), call("fail", reason="why"), call("multiply", a="x", b=1)]
        return calls[turn] if turn < 3 else "done"

    with SmallServer("tools") as server:
        environment = openenv(server.url)
        assert list(environment.tools) == ["fail", "multiply"]
        [[row, _]], script = played(answer, environments=environment, params=TWO)
    assert '"name": "multiply", "description": "Multiplies two integers."' in script.prompts[0]
    assert row.finish_reason == "stop"
    assert row.environment_reward == 0.5
    product, failure, mistake = [record for turn in row.turns for record in turn.calls]
    assert (product.result, product.error) == ("42", "")
    assert "Error calling tool 'fail': why" in failure.result
    assert failure.error.startswith("ToolError")
    assert "must be an integer" in mistake.error


def test_actions_and_observations_may_be_mapped():
    def action(text):
        if not text.isdigit():
            raise ValueError(f"{text!r} is not a number")
        return {"text": "a" * int(text)} if int(text) else {}

    def answer(text, sample, turn):
        return ["some", "0", "4", "1", "1"][turn]

    with SmallServer("words") as server:
        environment = openenv(server.url, action=action, observation=lambda seen: f"<{seen['text']}>")
        [[row]], _ = played(answer, environments=environment, params=SamplingParams(n=1, max_tokens=2000))
    assert row.finish_reason == "done"
    assert "'some' is not a number" in texts(row)[1]
    assert "Field required" in texts(row)[3]
    assert texts(row)[5].startswith("<Again")
    assert [message["type"] for message in server.messages] == ["reset", "step", "step", "step", "step", "close"]


def test_a_failure_of_the_server_leaves_the_episode_out():
    fates = {
        "crash": "EXECUTION_ERROR.*crashed",
        "nan": "not a finite number",
        "odd": "not answer as OpenEnv",
        "hang": "not answered within 0.2 s",
        "leave": "ended the session",
    }
    with SmallServer("words") as server:
        environment = openenv(server.url, message_timeout_s=0.2)
        for word, match in fates.items():
            with pytest.warns(UserWarning, match=match):
                [[row, other]], _ = played(
                    lambda text, sample, turn, word=word: "fine" if sample else word, environments=environment
                )
            assert (row.finish_reason, row.environment_reward) == ("env_error", None)
            assert (other.finish_reason, other.environment_reward is None) == ("done", False)
        deadline_s = time.monotonic() + 5
        while server.num_sessions and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert server.num_sessions == 0


def test_mistakes_are_found_at_the_start():
    with pytest.raises(ValueError, match=r"takes an address such as .*, got 'example.org'"):
        openenv("example.org")
    with pytest.raises(ValueError, match="positive message_timeout_s, got 0"):
        openenv("ws://127.0.0.1:1", message_timeout_s=0)
    with pytest.raises(InfrastructureError, match=r"127\.0\.0\.1:1/schema cannot be read"):
        openenv("ws://127.0.0.1:1")
    with SmallServer("moves") as server:
        with pytest.raises(ValueError, match=r"has no tools, and its actions have the fields .*x.*; give action="):
            openenv(server.url)
        missing = openenv(server.url, action=json.loads, reset_columns=["level"])
        with pytest.raises(RunError, match="no column level"):
            played(lambda *_: "x", environments=missing, environment_retries=0, params=SamplingParams(n=2))


@pytest.mark.drawn(4, "episodes")
@pytest.mark.heavy
def test_training_on_an_openenv_server(tmp_path):
    with SmallServer("words") as server:
        rows = [{"prompt": PROMPT, "topic": topic} for topic in ("cats", "dogs", "owls", "bees")]
        check_five_steps(tmp_path, rows, openenv(server.url, reset_columns=["topic"]))
