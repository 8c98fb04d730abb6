"""The contract of reward functions."""

import functools

import numpy as np
import pytest

from groupax.rewards.contract import resolve_rewards, score
from groupax.rollout import Rollout


def rollouts_of(texts, conversational=False, **columns):
    return [
        Rollout(
            prompt_index=0,
            sample_index=index,
            example={
                "prompt": [{"role": "user", "content": "q"}] if conversational else "q",
                **{name: values[index] for name, values in columns.items()},
            },
            prompt_ids=np.array([1]),
            completion_ids=np.array([5, 6]),
            policy_logps=np.zeros(2),
            sampler_logps=np.zeros(2),
            finish_reason="stop",
            policy_version=0,
            text=text,
        )
        for index, text in enumerate(texts)
    ]


def run(function, rows, columns=()):
    [reward] = resolve_rewards(function, columns)
    return score(reward, rows)


def test_a_function_gets_what_its_signature_takes():
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [1.0, 2.0]

    def some(completions, answer):
        return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]

    rows = rollouts_of(["a", "b"], answer=["a", "a"])
    assert run(everything, rows, ["answer"]).tolist() == [1.0, 2.0]
    assert set(seen) == {"prompts", "completions", "completion_ids", "answer"}
    assert seen["completion_ids"] == [[5, 6], [5, 6]]
    assert run(some, rows, ["answer"]).tolist() == [1.0, 0.0]


def test_completions_have_the_form_of_the_prompts():
    def contents(completions):
        return [len(completion[0]["content"]) for completion in completions]

    assert run(contents, rollouts_of(["ab", "c"], conversational=True)).tolist() == [2.0, 1.0]


def test_none_means_not_applicable():
    np.testing.assert_array_equal(run(lambda completions: [1, None], rollouts_of("ab")), [1.0, np.nan])


def test_arrays_and_bools_are_numbers():
    assert run(lambda completions: np.array([1, 0]), rollouts_of("ab")).tolist() == [1.0, 0.0]
    assert run(lambda completions: [True, False], rollouts_of("ab")).tolist() == [1.0, 0.0]


class Instance:
    def __call__(self, completions):
        return [0.5 for _ in completions]


def named(completions, scale=1.0):
    return [scale for _ in completions]


def test_names_are_unique_and_telling():
    rewards = resolve_rewards(
        [named, functools.partial(named, scale=2.0), Instance(), named, "think_answer_format"], []
    )
    assert [r.name for r in rewards] == ["named", "named_2", "Instance", "named_3", "think_answer_format"]
    assert score(rewards[1], rollouts_of("a")).tolist() == [2.0]


def test_rewards_by_reference():
    [reward] = resolve_rewards("groupax.rewards.builtin:think_answer_correct", ["answer"])
    texts = [
        "<think>1+1=2</think><answer>2</answer>",
        " <think>1+1=2</think>\n<answer> 2 </answer>\n",
        "<think>?</think><answer>3</answer>",
        "<answer>2</answer>",
        "<think></think><answer>2</answer>",
        "2",
    ]
    assert score(reward, rollouts_of(texts, answer=["2"] * 6)).tolist() == [1, 1, 0, 0, 0, 0]
    assert run("think_answer_format", rollouts_of(texts)).tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"'bad' returned 1 values for 2 completions"),
        ([1.0, float("nan")], "returned nan for completion 1"),
        ([1.0, float("inf")], "returned inf for completion 1"),
        (["1.0", 2.0], "returned '1.0' for completion 0"),
        ([[1.0], 2.0], r"returned \[1.0\] for completion 0"),
        (3.0, "returned 3.0; it must return a list"),
        (None, "returned None; it must return a list"),
    ],
)
def test_rubbish_is_named(returned, message):
    def bad(completions):
        return returned

    with pytest.raises(ValueError, match=message):
        run(bad, rollouts_of("ab"))


def test_an_exception_names_the_function():
    def broken(completions):
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        run(broken, rollouts_of("ab"))
    assert "raised by the reward function 'broken' on 2 completions" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ([], "reward_funcs is empty"),
        ("think_anser_format", "did you mean think_answer_format"),
        ("no.such.module:f", "cannot be imported"),
        (3, "must be a function or a name"),
        (lambda completions, anser: [], "needs an argument 'anser'; did you mean answer"),
    ],
)
def test_what_is_no_reward(function, message):
    with pytest.raises(ValueError, match=message):
        resolve_rewards(function, ["answer"])
