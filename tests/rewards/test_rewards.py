"""The contract of reward functions: what they get, what they may return, how they are found."""

import functools
import itertools
import re
import sys

import numpy as np
import pytest

from groupax.core.settings.rollouts import RewardSettings
from groupax.core.types import Rollout
from groupax.rewards.resolve import find_reward, resolve_rewards, with_columns
from groupax.rewards.runner import RewardRunner


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


def scores_of(function, rows, columns=(), **settings):
    """The scores of one function on one group."""
    runner = RewardRunner(resolve_rewards(function, columns), RewardSettings(**settings))
    try:
        runner.start(rows)
        [[scores]] = runner.finish()
        return scores
    finally:
        runner.close()


def run(function, rows, columns=()):
    scores = scores_of(function, rows, columns)
    assert not scores.error, scores.error
    return scores.values


def test_a_function_gets_what_its_signature_takes():
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [1.0, 2.0]

    def some(completions, answer):
        return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]

    rows = rollouts_of(["a", "b"], answer=["a", "a"])
    assert run(everything, rows, ["answer"]).tolist() == [1.0, 2.0]
    names = "prompts completions completion_ids completion_mask turns answer batch trainer_state log_extra log_metric"
    assert set(seen) == set(names.split())
    assert seen["completion_ids"] == [[5, 6], [5, 6]]
    assert seen["batch"] == {"prompt": ["q"], "answer": ["a"]}
    assert run(some, rows, ["answer"]).tolist() == [1.0, 0.0]


class Instance:
    def __call__(self, completions):
        return [0.5 for _ in completions]


def named(completions, scale=1.0):
    return [scale for _ in completions]


def test_names_are_unique_and_telling():
    given = [named, functools.partial(named, scale=2.0), Instance(), named, "think_answer_format"]
    rewards = resolve_rewards(given, [])
    assert [r.name for r in rewards] == ["named", "named_2", "Instance", "named_3", "think_answer_format"]
    assert run(functools.partial(named, scale=2.0), rollouts_of("a")).tolist() == [2.0]


def test_rewards_by_reference():
    texts = [
        " <think>1+1=2</think>\n<answer> 2 </answer>\n",
        "<think>?</think><answer>3</answer>",
        "<answer>2</answer>",
    ]
    reference = "groupax.rewards.formats:think_answer_correct"
    assert run(reference, rollouts_of(texts, answer=["2"] * 3), ["answer"]).tolist() == [1, 0, 0]
    assert run("think_answer_format", rollouts_of(texts)).tolist() == [1, 1, 0]


def test_options_and_columns_of_a_name():
    rows = rollouts_of(["<a>\nx\n</a>", "<a>x</a>"], solution=["1", "2"])
    assert run("xml_format(tags=['a'], strict=True)", rows).tolist() == [1, 0]
    assert run("xml_format(tags=('a',))", rows).tolist() == [1, 1]
    rows = rollouts_of(["1", "1"], solution=["1", "2"])
    assert run("gsm8k_accuracy(answer=solution)", rows, ["solution"]).tolist() == [1, 0]


def test_columns_under_other_names():
    def right(completions, answer):
        return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]

    rows = rollouts_of("ab", solution=["a", "a"])
    assert run(with_columns(right, answer="solution"), rows, ["solution"]).tolist() == [1, 0]
    with pytest.raises(
        ValueError, match="the column 'solutoin', which the dataset does not have; it has solution; did"
    ):
        resolve_rewards(with_columns(right, answer="solutoin"), ["solution"])


def test_a_column_does_not_take_the_place_of_what_was_sampled():
    columns = {"completions": ["x", "y"], "batch": [1, 2], "completion_ids": [3, 4], "prompts": ["r", "s"]}
    rows, seen = rollouts_of("ab", **columns), {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [0.0, 0.0]

    run(everything, rows, list(columns))
    assert (seen["completions"], seen["prompts"], seen["completion_ids"]) == (["a", "b"], ["q", "q"], [[5, 6], [5, 6]])
    assert seen["batch"]["completions"] == ["y"]  # of the prompt, whose rows have one example in a run

    def under_another_name(completions, answered):
        assert (completions, answered) == (["a", "b"], ["x", "y"])
        return [0.0, 0.0]

    run(with_columns(under_another_name, answered="completions"), rows, list(columns))
    with pytest.raises(ValueError, match="cannot take 'completions' from the column 'gold'"):
        resolve_rewards(with_columns(everything, completions="gold"), ["gold"])


async def awaited(completions):
    return [float(len(text)) for text in completions]


class AsyncInstance:
    async def __call__(self, completions):
        return [float(len(text)) for text in completions]


def test_async_functions():
    assert run(awaited, rollouts_of(["ab", "c"])).tolist() == [2.0, 1.0]
    assert run(AsyncInstance(), rollouts_of(["ab", "c"])).tolist() == [2.0, 1.0]
    assert run(functools.partial(awaited), rollouts_of(["ab", "c"])).tolist() == [2.0, 1.0]


def test_what_a_function_logs():
    def logging(completions, log_extra, log_metric, trainer_state):
        log_extra("length", [len(text) for text in completions])
        log_metric("custom", 3)
        return [float(trainer_state.step) for _ in completions]

    scores = scores_of(logging, rollouts_of(["ab", "c"]))
    assert scores.values.tolist() == [0.0, 0.0]
    assert scores.extra == {"length": [2, 1]}
    assert scores.metrics == {"custom": 3.0}


@pytest.mark.parametrize(
    ("function", "name", "value", "message"),
    [
        ("log_metric", 5, 1.0, "log_metric: name must be a text, got int 5"),
        ("log_metric", "x", "1.5", "log_metric: the value of 'x' must be a number, got str '1.5'"),
        ("log_metric", "x", 10**400, "the value of 'x' must be a number, got int 1000"),
        ("log_extra", ("a",), [1, 2], r"log_extra: column must be a text, got tuple \('a',\)"),
        ("log_extra", "x", 1.0, "log_extra: values must be a list with one value per completion, got 1.0"),
        ("log_extra", "x", {"a": 1}, "values must be a list with one value per completion, got {'a': 1}"),
    ],
)
def test_what_cannot_be_logged_is_refused_where_it_is(function, name, value, message):
    def logging(completions, log_metric, log_extra):
        {"log_metric": log_metric, "log_extra": log_extra}[function](name, value)
        return [1.0] * len(completions)

    assert re.search(f"in logging\n(.*\n)*TypeError: .*{message}", scores_of(logging, rollouts_of(["ab", "c"])).error)


@pytest.mark.parametrize(
    ("returned", "message", "num_failures"),
    [
        ([1.0], r"'bad' returned 1 value for 2 completions", 2),
        ([1.0, float("nan")], "returned nan for completion 1", 1),
        ([10**5000, 2.0], "returned a value of type int for completion 0", 1),
        ([[1.0, 1.0], 2.0], "returned a list of 2 for completion 0 ('a'), which has 1 turn;", 1),
        ([{"a": 1.0}, 2.0], "returned {'a': 1.0} for completion 0", 1),
        (3.0, "returned 3.0; it must return a list", 2),
        ("ab", "returned 'ab'; it must return a list", 2),
        (itertools.count(), "returned 1000000 values for 2 completions", 2),
        (iter(int, 1), "for 2 completions", 2),
        ([1e308, 1.0], "returned 1e+308 for completion 0 ('a'); return a finite number of at most 1e+15", 1),
        (np.array([1e300, 1.0]), "returned 1e+300 for completion 0", 1),
    ],
)
def test_rubbish_is_named_and_counts_as_no_reward(returned, message, num_failures):
    def bad(completions):
        return returned

    scores = scores_of(bad, rollouts_of("ab"))
    assert message in scores.error
    assert scores.num_failures == num_failures == np.isnan(scores.values).sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ([], "reward_funcs is empty"),
        ("think_anser_format", "did you mean think_answer_format"),
        ("no.such.module:f", r"there is no module 'no' in the current folder \(.*\), in PYTHONPATH or"),
        ("my_rewards.py:f", "names a file; name the module, without .py: 'my_rewards:f'"),
        ("json:lods", "module 'json' has no 'lods'; it has .*; did you mean loads"),
        (3, "must be a function, a reward model or a name"),
        (lambda completions, anser: [], r"needs an argument 'anser'; it can receive .*\); did you mean answer\?$"),
        (lambda x, /, completions: [], "needs an argument 'x'"),
        ("xml_format(tag=('a',))", "has no option 'tag'; did you mean tags"),
        ("xml_format('a')", "write it as name"),
        ("./nowhere", "neither a model folder nor a hub id"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_reward(function, message):
    with pytest.raises(ValueError, match=message):
        resolve_rewards(function, ["answer"])


def test_every_built_in_reward_has_its_name():
    from groupax import rewards

    for name in rewards.BUILTIN_REWARDS:
        assert find_reward(name) is getattr(rewards, name)
        assert getattr(rewards, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'think_fromat'"):
        rewards.think_fromat


def test_the_command_finds_modules_in_the_current_folder(tmp_path, monkeypatch, capsys):
    from groupax.cli.main import entry_point

    (tmp_path / "rewards_of_mine.py").write_text("def short(completions):\n    return [0.5 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.setattr(sys, "argv", ["groupax", "--help"])
    with pytest.raises(SystemExit, match="0"):
        entry_point()
    assert "usage: groupax" in capsys.readouterr().out
    [reward] = resolve_rewards("rewards_of_mine:short", [])
    assert reward.name == "short"
