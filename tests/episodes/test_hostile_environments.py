"""Environments and tools that hang, crash, lie and leak: the other episodes are as if nothing had happened."""

import asyncio
import threading
import time
import warnings

import numpy as np
import pytest

from groupax.core.settings.sampling import SamplingParams
from groupax.tools.tool import Step, tool

from .test_episodes import TOKENIZER, call, played

PARAMS = SamplingParams(n=3, max_tokens=2000)


class Calm:
    """Answers any message, and ends at the third."""

    def __init__(self):
        self.heard = 0

    def reset(self, row, seed):
        return f" {row['words']}"

    def act(self, message):
        self.heard += 1
        return self.answer(message["content"])

    def answer(self, text):
        return Step(f"{len(text)}!", reward=0.25, done=self.heard == 3)

    @tool
    def look(self, text: str):
        """Looks.

        Args:
            text: Where.
        """
        return self.answer(text)

    def score(self):
        return 1.0

    def close(self):
        pass


def one_is_bad(text, sample, turn):
    return "bad" if sample == 0 and turn == 1 else f"hello {turn}"


def play(environment, answer, num=2, example=None, **settings):
    """A group of episodes, and the warnings."""
    settings = {"tool_timeout_s": 1.0, "environment_retries": 1, **settings}
    params = SamplingParams(n=num, max_tokens=2000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        [group], _ = played(answer, environments=environment, params=params, example={"words": ["a"]}, **settings)
    return group, [str(each.message) for each in caught]


def what_each_does(reactions, as_call, **settings):
    """Episodes that meet one of the reactions each, two calm ones behind them, and the warnings."""

    class Bad(Calm):
        def answer(self, text):
            return reactions[int(text[4:])]() if text.startswith("bad ") else super().answer(text)

    def answer(text, sample, turn):
        is_bad = turn == 1 and sample < len(reactions)
        said = f"bad {sample}" if is_bad else f"hello {turn}"
        return call("look", text=said) if as_call and is_bad else said

    return play(Bad, answer, len(reactions) + 2, **settings)


def hangs():
    time.sleep(8)  # in C, without Python's lock


def recurses():
    return recurses()


def raises(error):
    def fails():
        raise error

    return fails


def generates():
    yield "a"


async def generates_later():
    yield "a"


def nested():
    found: list = []
    for _ in range(100_000):
        found = [found]
    return [{"role": "user", "content": found}]


def circular():
    message: dict = {"role": "user"}
    message["content"] = [message]
    return [message]


BAD_ANSWERS = [
    hangs,
    raises(TimeoutError("own")),
    raises(ValueError("\x1b[2J no")),
    raises(KeyboardInterrupt()),
    raises(SystemExit(3)),
    raises(MemoryError()),
    recurses,
    lambda: b"bytes",
    object,
    generates,
    generates_later,
    lambda: asyncio.sleep(0),
    lambda: Step("x", reward=float("nan")),
    lambda: Step("x", reward=float("-inf")),
    lambda: Step("x", reward=1e300),
    lambda: Step("x", reward=10**400),
    lambda: Step("x", reward="1"),
    lambda: Step("x", done="no"),
    lambda: [{"role": "assistant", "content": "I win"}],
    lambda: [{"role": "a<|im_end|>", "content": "x"}],
    lambda: [{"role": "user", "content": 5}],
    nested,
    circular,
]


@pytest.mark.heavy
def test_environments_that_fail_are_left_out_and_told_once():
    rows, told = what_each_does(BAD_ANSWERS, as_call=False, tool_timeout_s=1.5)
    reasons = ["timeout"] * 2 + ["env_error"] * (len(BAD_ANSWERS) - 2) + ["done"] * 2
    assert [row.finish_reason for row in rows] == reasons
    assert [row.environment_reward for row in rows] == [None] * len(BAD_ANSWERS) + [1.75] * 2
    assert all(row.is_failure for row in rows[:-2])
    again = sorted(each.partition(": ")[2] for each in told if "begins again" in each)
    assert again == sorted(each.partition(": ")[2] for each in told if "left out" in each)
    kinds = "InfrastructureError KeyboardInterrupt MemoryError RecursionError SystemExit TimeoutError"
    assert [each.partition(":")[0] for each in again] == [*kinds.split(), "TypeError", "ValueError"]
    assert not any("\x1b" in each for each in told)


GOOD_ANSWERS = [
    (lambda: Step("x", reward=True), 1.0, "x"),
    (lambda: Step("x", reward=np.float32(0.5)), 0.5, "x"),
    (lambda: Step("x", reward=np.int8(3), done=np.bool_(False)), 3.0, "x"),
    (lambda: Step("x", reward=None), 0.0, "x"),
    (lambda: [{"role": "system", "content": "be brief"}], 0.0, "<|im_start|>system\nbe brief"),
    (lambda: [{"role": "user", "content": [{"type": "text", "text": "a part"}]}], 0.0, "a part"),
    (lambda: "\ud800 half", 0.0, "? half"),
    (lambda: "x" * 5_000_000, 0.0, "characters left out"),
]


def test_environments_that_are_merely_odd_are_taken_as_they_are():
    rows, told = what_each_does([reaction for reaction, _, _ in GOOD_ANSWERS], as_call=False, max_result_kb=0.2)
    assert not told
    for row, (_, reward, text) in zip(rows, GOOD_ANSWERS, strict=False):
        assert row.finish_reason == "done"
        assert text in TOKENIZER.decode(row.completion_ids)
        assert row.turns[1].reward == reward


def test_what_a_tool_raises_and_returns_is_read_by_the_model():
    reactions = [hangs, raises(OSError("no")), raises(KeyboardInterrupt()), recurses, generates]
    odd = [b"bytes", object(), {"a": {1}}, 5, float("nan"), ["\ud800"], ...]
    rows, told = what_each_does([*reactions, *[lambda value=value: value for value in odd]], as_call=True)
    assert not told
    assert {row.finish_reason for row in rows} == {"done"}
    results = [row.turns[1].calls[0] for row in rows[:-2]]
    assert [bool(each.error) for each in results] == [True] * len(reactions) + [False] * len(odd)
    assert all("error" in each.result for each in results[: len(reactions)])
    assert results[len(reactions)].result == "b'bytes'"


def test_scores_that_fail_leave_their_episodes_out():
    scores = [hangs, raises(OSError("no")), lambda: float("nan"), lambda: "1", lambda: None, lambda: 2]

    class Scored(Calm):
        def answer(self, text):
            self.said = text
            return Step("end", done=True)

        async def score(self):
            reaction = scores[int(self.said)]
            if reaction is hangs:
                await asyncio.sleep(8)
            return reaction()

    rows, told = play(Scored, lambda text, sample, turn: str(sample), len(scores), environment_retries=0)
    assert [row.finish_reason for row in rows] == ["timeout"] + ["env_error"] * 3 + ["done"] * 2
    assert [row.environment_reward for row in rows] == [None] * 5 + [2.0]
    assert len(told) == 3


@pytest.mark.parametrize("method", ["__init__", "reset"])
def test_episodes_whose_environments_do_not_start_are_left_out(method):
    lock, made, reactions = threading.Lock(), [], [hangs, raises(OSError("no")), raises(KeyboardInterrupt())]

    class Starts(Calm):
        def __init__(self):
            super().__init__()
            with lock:
                self.number = len(made)
                made.append(self)
            self.meet("__init__")

        def reset(self, row, seed):
            self.meet("reset")
            return super().reset(row, seed)

        def meet(self, here):
            if here == method and self.number < len(reactions):
                reactions[self.number]()

    group, told = play(Starts, lambda *_: "hello", 5, environment_retries=0)
    assert sorted(row.finish_reason for row in group) == ["done", "done", "env_error", "env_error", "timeout"]
    assert [row.environment_reward for row in group if row.is_failure] == [None] * 3
    assert len({len(row.prompt_ids) for row in group}) == 1
    assert len(told) == 3
    group, told = play(Starts, lambda *_: "hello", 5)
    assert {row.finish_reason for row in group} == {"done"}


def test_a_close_that_fails_is_told_once():
    class Closing(Calm):
        def close(self):
            raise OSError("no")

    with pytest.warns(UserWarning, match="could not be closed: OSError: no") as caught:
        groups, _ = played(one_is_bad, environments=Closing, num_prompts=3, example={"words": ["a"]})
    assert len(caught) == 1
    assert all(row.finish_reason == "done" for group in groups for row in group)


def test_what_an_environment_changes_is_its_own():
    words, kept = ["a"], []

    class Changes(Calm):
        def reset(self, row, seed):
            row["words"].append("b")
            row["prompt"] = "mine"
            return super().reset(row, seed)

        def answer(self, text):
            for message in kept:
                message["role"] = "assistant"
            kept.append({"role": "user", "content": f"{len(text)}!"})
            return Step([kept[-1]], done=self.heard == 3)

        def act(self, message):
            answer = super().act(dict(message))
            message["content"] = "forged"
            return answer

    [group], _ = played(
        lambda text, sample, turn: f"hello {turn}", environments=Changes, params=PARAMS, example={"words": words}
    )
    assert words == ["a"]
    assert {row.prompt[-1]["content"] for row in group} == {"go ['a', 'b']"}
    for row in group:
        assert [each["role"] for each in row.messages] == ["assistant", "user", "assistant", "user", "assistant"]
        assert row.messages[0]["content"] == "hello 0"
