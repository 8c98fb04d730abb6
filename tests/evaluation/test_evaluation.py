"""Estimates, their intervals, paired comparisons, the files of items, and evaluation through the trainer."""

import itertools
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from groupax.cli.summary import show, write_report
from groupax.core.settings.sampling import SamplingParams
from groupax.evaluation.evaluate import Evaluation, SetEvaluation, find_correctness_reward
from groupax.evaluation.items import (
    ACCURACY_REWARDS,
    Completion,
    Item,
    binary_rewards,
    compare,
    estimates,
    item_values,
    math_answer,
    named_sets,
    number_answer,
    read_items,
    sources_by_name,
    tagged_answer,
    write_items,
)
from groupax.evaluation.paired import mcnemar, paired_difference
from groupax.rewards.maths import last_boxed
from groupax.rewards.resolve import resolve_rewards
from groupax.rollouts.estimates import mean_share, mean_value, pass_at_k, t_quantile
from groupax.runs.trainer import TrainResult
from tests.training.test_trainer import PROMPTS, a_trainer, count_a, lines_of


def an_item(key, solved, answers=None, rewards=None, counts_votes=True):
    answers = answers or [None] * len(solved)
    rewards = rewards or [None if each is None else float(each) for each in solved]
    completions = [
        Completion("text", 1, "stop", {"r": reward}, reward, each, answer)
        for each, answer, reward in zip(solved, answers, rewards, strict=True)
    ]
    return Item(key, 0, "p", {}, completions, counts_votes)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n, right in itertools.product(range(1, 7), range(7)):
        if right > n:
            continue
        draws = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(draws, k))
            assert pass_at_k(n, right, k) == pytest.approx(np.mean([any(subset) for subset in subsets]))
    with pytest.raises(ValueError, match="pass@4 needs at least 4 completions per item, there are 3"):
        pass_at_k(3, 1, 4)


def test_right_answers_count_as_one():
    item = an_item("a", [True, True, False, False, False], ["1/2", "0.5", "3", "3", None])
    assert item_values(item)["maj@5"] == 0.5  # of two answers with two votes each
    unmarked = an_item("b", [True, False, False], ["7", "7", "8"])  # right, but not in the form that the reward wants
    assert item_values(unmarked)["maj@3"] == 1.0
    assert item_values(an_item("c", [False, True, False], ["8", "7", "8"]))["maj@3"] == 0.0
    assert item_values(an_item("d", [False, False], [None, None]))["maj@2"] == 0.0


@pytest.mark.parametrize(
    ("read", "text", "answer"),
    [
        (number_answer, "so 1,000.0 #### 12.50", "12.5"),
        (number_answer, "#### Step 3: Add up\n" + r"hence \boxed{\text{1{,}018}}", "1018"),
        (tagged_answer, "<answer>1</answer> <answer> b </answer>", "b"),
        (tagged_answer, "</answer> only", None),
        (math_answer, r"first \boxed{1}, then \boxed{\dfrac{1}{\left(2\right)}}.", r"\frac{1}{(2)}"),
        (math_answer, "<answer> $x + 1$. </answer>", "x+1"),
        (last_boxed, r"\boxed{never closed", None),
        (last_boxed, r"} \boxed{a \boxed{b}} and \boxed{never {closed}", "b"),
    ],
)
def test_answers_are_read(read, text, answer):
    assert read(text) == answer


def test_accuracy_rewards_exist():
    from groupax.rewards import BUILTIN_REWARDS

    assert {*ACCURACY_REWARDS} <= {*BUILTIN_REWARDS}
    rewards = resolve_rewards([count_a, "gsm8k_accuracy"], ["answer"])
    assert find_correctness_reward(None, rewards) == "gsm8k_accuracy"
    assert find_correctness_reward(None, rewards[:1]) is None
    with pytest.raises(
        ValueError, match=r"correctness_reward is 'count_b', which is not a reward function .*; did you mean count_a"
    ):
        find_correctness_reward("count_b", rewards)


def test_wilson_is_wilson_and_student_is_student():
    estimate = mean_share([1.0] * 8 + [0.0] * 2)
    np.testing.assert_allclose((estimate.low, estimate.high), (0.490162, 0.943318), atol=1e-5)  # Wilson (1927)
    assert mean_share([0.0] * 500).high == pytest.approx(0.00763, abs=1e-4)
    assert mean_share([1.0] * 500).low == pytest.approx(1 - 0.00763, abs=1e-4)
    # all items half right: as uncertain as independent draws, and never more certain
    assert mean_share([0.5] * 100, 4).low == pytest.approx(mean_share([1.0] * 200 + [0.0] * 200).low)
    assert t_quantile(4) == pytest.approx(2.7764, abs=1e-4)
    values = mean_value([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.7764 * math.sqrt(2.5 / 5)
    np.testing.assert_allclose((values.value, values.low, values.high), (3, 3 - half, 3 + half), atol=1e-3)
    assert math.isnan(mean_value([1.0]).low)
    assert math.isnan(mean_share([]).value)


def coverage(draw, estimate, truth, num_runs=2000):
    rng = np.random.default_rng(7)
    covered = [(e := estimate(draw(rng))).low <= truth <= e.high for _ in range(num_runs)]
    return float(np.mean(covered))


GREEDY = [
    (lambda rng, p=p, N=N: rng.binomial(1, p, size=N).astype(float), mean_share, p)
    for p in (0.02, 0.1, 0.5, 0.9)
    for N in (50, 500)
]


@pytest.mark.parametrize(
    ("draw", "estimate", "truth"), [*GREEDY, (lambda rng: rng.exponential(2.0, size=200) - 1.0, mean_value, 1.0)]
)
def test_intervals_of_shares_and_rewards_cover_19_times_in_20(draw, estimate, truth):
    found = coverage(draw, estimate, truth)
    assert 0.925 <= found <= 0.99, found


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.6), (0.05, 2.0), (5.0, 5.0)])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_intervals_of_sampled_items_cover_19_times_in_20(a, b, k):
    N, n = 100, 8
    shares = np.array([pass_at_k(n, c, k) for c in range(n + 1)])
    moments = [math.exp(math.lgamma(b + k) + math.lgamma(a + b) - math.lgamma(b) - math.lgamma(a + b + k))]
    truth = 1.0 - moments[0]

    def draw(rng):
        return shares[rng.binomial(n, rng.beta(a, b, size=N))]

    found = coverage(draw, lambda values: mean_share(values, n), truth)
    assert 0.925 <= found <= 0.99, found


def test_mcnemar_is_the_binomial_test():
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(1, 0) == 1.0
    assert mcnemar(8, 0) == pytest.approx(2 / 256)
    assert mcnemar(10, 3) == mcnemar(3, 10) == pytest.approx(0.092285, abs=1e-6)


def test_a_paired_difference_of_right_and_wrong():
    before = [1.0] * 30 + [0.0] * 20 + [0.0] * 50
    after = [1.0] * 25 + [0.0] * 5 + [1.0] * 20 + [0.0] * 50
    found = paired_difference(before, after)
    assert (found.num_gained, found.num_lost) == (20, 5)
    assert found.difference.value == pytest.approx(0.15)
    assert found.difference.method == "bonett-price"
    assert found.test == "mcnemar, exact"
    assert found.p_value == pytest.approx(mcnemar(20, 5))
    assert found.is_clear
    assert paired_difference(before, before).difference.low < 0 < paired_difference(before, before).difference.high
    with pytest.raises(ValueError, match="needs the same items, got 2 and 1"):
        paired_difference([0.0, 1.0], [1.0])


def test_a_difference_is_clear_only_if_the_interval_and_the_test_agree():
    before, after = [1.0] * 9 + [0.0] * 51, [0.0] * 9 + [1.0] * 2 + [0.0] * 49
    found = paired_difference(before, after)
    assert found.difference.high < 0
    assert found.p_value == pytest.approx(0.0654, abs=1e-4)
    assert not found.is_clear


@pytest.mark.parametrize(("gain", "lose", "N"), [(0.1, 0.05, 100), (0.02, 0.01, 500), (0.4, 0.1, 60)])
def test_intervals_of_differences_cover_19_times_in_20(gain, lose, N):
    def draw(rng):
        return rng.choice([1.0, -1.0, 0.0], p=[gain, lose, 1 - gain - lose], size=N)

    def difference(change):
        return paired_difference((change < 0).astype(float), (change > 0).astype(float)).difference

    assert 0.925 <= coverage(draw, difference, gain - lose) <= 0.99


def test_a_paired_difference_of_rewards():
    rng = np.random.default_rng(0)
    before = rng.normal(size=400)
    found = paired_difference(before.tolist(), (before + rng.normal(0.1, 0.5, size=400)).tolist())
    assert found.test == "student"
    assert found.difference.low < 0.1 < found.difference.high
    assert found.p_value < 0.01
    assert paired_difference([0.5, 0.7], [0.5, 0.7]).p_value == 1.0
    assert math.isnan(paired_difference([0.5], [0.7]).p_value)


def test_items_are_compared_by_their_rows():
    before = [an_item("a", [True]), an_item("b", [False]), an_item("c", [False])]
    after = [an_item("b", [True]), an_item("a", [True]), an_item("d", [True])]
    found = compare(before, after)
    assert (found.num_items, found.num_only_before, found.num_only_after) == (2, 1, 1)
    assert found.differences["pass@1"].num_gained == 1
    with pytest.raises(ValueError, match=r"no item in common \(1 and 1 items\)"):
        compare(before[:1], after[2:])


def test_totals_of_other_reward_functions_are_not_compared():
    before = [an_item("a", [True]), an_item("b", [False])]
    assert "reward" in compare(before, before).differences
    after = [
        replace(item, completions=[replace(each, rewards={**each.rewards, "more": 0.5}) for each in item.completions])
        for item in before
    ]
    found = compare(before, after)
    assert found.has_other_rewards
    assert "reward" not in found.differences
    assert "pass@1" in found.differences
    assert found.metrics_after == ("rewards/more/mean",)


def test_items_without_a_verdict_are_left_out_of_pass_at_k():
    items = [an_item("a", [True, False]), an_item("b", [None, None]), an_item("c", [False, False])]
    found = estimates(items)
    assert found["pass@1"].num_items == found["reward"].num_items == 2
    assert found["pass@1"].value == 0.25
    assert found["pass@2"].value == 0.5


def test_items_survive_their_file(tmp_path):
    items = [
        an_item("a", [True, False], ["1", None]),
        replace(an_item("b", [None]), prompt=[{"role": "user", "content": "…\u2028"}]),
    ]
    write_items(tmp_path / "x.jsonl", items)
    assert read_items(tmp_path / "x.jsonl") == items
    with pytest.raises(ValueError, match="cannot be read"):
        read_items(tmp_path / "z.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('{"prompt": 1}', "an item has columns, completions, "),
        pytest.param("[" * 100_000, "recursion", id="deep"),
        ({"columns": []}, "columns must be a mapping of names to values"),
        ({"completions": []}, "it has no completions"),
        ({"completions": ["x"]}, "must be a mapping"),
        ({"text": 1}, "text must be a text"),
        ({"rewards": {"other": 1.0}}, "the same rewards"),
        ({"rewards": {"r": "x"}}, "must be a mapping of names to values, each a number or None"),
        ({"rewards": {"r": 10**400}}, "int too large"),
        ({"reward": float("inf")}, "reward inf is not finite"),
    ],
)
def test_lines_that_are_no_items_are_refused(tmp_path, change, message):
    if isinstance(change, dict):
        record = asdict(an_item("a", [True, False]))
        (record["completions"][1] if change.keys() <= record["completions"][1].keys() else record).update(change)
        change = json.dumps(record)
    (tmp_path / "x.jsonl").write_text(f"{change}\n")
    with pytest.raises(ValueError, match=f"line 1 is not an item of an evaluation: .*{message}"):
        read_items(tmp_path / "x.jsonl")


def test_sets_have_names():
    assert named_sets([1]) == {"eval": [1]}
    assert sources_by_name(["data/gsm8k", "hard=x/test.jsonl", "owner/name"]) == {
        "gsm8k": "data/gsm8k",
        "hard": "x/test.jsonl",
        "name": "owner/name",
    }
    assert sources_by_name(["a=b/x.jsonl"], only="eval") == {"a": "b/x.jsonl"}
    assert sources_by_name(["c/odd=place/x.jsonl"], only="eval") == {"eval": "c/odd=place/x.jsonl"}
    for bad, message in (({}, "is an empty mapping"), ({"a/b": []}, "got 'a/b'"), ({1: []}, "got 1")):
        with pytest.raises(ValueError, match=message):
            named_sets(bad)
    with pytest.raises(ValueError, match="two evaluation sets have the name 'test'"):
        sources_by_name(["a/test.jsonl", "b/test.jsonl"])


@pytest.mark.parametrize(
    ("solved", "rewards", "start", "end"),
    [
        (
            (40, 0),
            (0.2, 0.8),
            "After 2 steps none of 40 held-out prompts became right and 40 wrong: pass@1 1.000 → 0.000",
            "compare the training prompts with these, and",
        ),
        (
            (40, 0),
            (0.8, 0.2),
            "After 2 steps none of 40",
            "; the reward in training did not rise (from 0.800 to 0.200): see docs/trou",
        ),
        (
            (20, 21),
            (0.2, 0.8),
            "After 2 steps 1 of 40 held-out prompts became right and none wrong, no sig",
            "sampled ones may improve first (eval_temperature)",
        ),
        ((0, 40), (0.2, 0.8), "After 2 steps 40 of 40 held-out prompts became right and none", "p = 1.8e-12)"),
        (
            (0, 0),
            (0.2, 0.8),
            "After 2 steps the model cannot do this task: pass@1 0.000 → 0.000 on 80 held-out prompts, at most 4.6 %",
            "",
        ),
    ],
)
def test_a_verdict_without_progress_says_where_to_look(tmp_path, solved, rewards, start, end, capsys):
    metrics = dict.fromkeys(("prompts", "prompts_dropped", "prompts_truncated", "prompts_unscorable"), 1.0)
    metrics["completions/clipped_ratio"], num_items = 0.0, 40 if any(solved) else 80
    before, after = (
        Evaluation({"eval": SetEvaluation(items, estimates(items), metrics, SamplingParams(temperature=0.0), "r", {})})
        for items in ([an_item(str(index), [index < num]) for index in range(num_items)] for num in solved)
    )
    lines = [{"step": float(step), "reward": reward} for step, reward in enumerate([rewards[0], None, rewards[1]])]
    counts = {"used": 1, "dropped": 0, "truncated": 0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    show(write_report(before, after, TrainResult(2, 1.0, 1.0, {}), counts, tmp_path))
    assert capsys.readouterr().out.splitlines()[1] == "mean reward by step"
    text = json.loads((tmp_path / "result.json").read_text())["verdicts"]["eval"]
    assert text.startswith(start)
    assert end in text


def test_rewards_that_may_mean_correct_are_found():
    items = [an_item("a", [None], rewards=[1.0]), an_item("b", [None, None], rewards=[0.0, None])]
    assert binary_rewards(items) == ["r"]
    assert binary_rewards([*items, an_item("c", [None], rewards=[0.5])]) == []


def starts_right(completions, gold):
    return [float(text[:1] == letter) for text, letter in zip(completions, gold, strict=True)]


@pytest.mark.heavy
def test_evaluation_of_several_sets_with_settings_of_its_own(tmp_path):
    of_evaluation = {"temperature": 0.7, "top_p": 0.9, "top_k": 8, "min_p": 0.01}
    settings = {f"eval_{name}": value for name, value in of_evaluation.items()}
    settings |= {"eval_num_generations": 4, "eval_max_completion_length": 8, "eval_steps": 2, "max_steps": 2}
    settings |= {"eval_dataset": {"all": PROMPTS, "few": PROMPTS[:3]}, "correctness_reward": "starts_right"}
    trainer = a_trainer(tmp_path, [count_a, starts_right], **settings)
    evaluation = trainer.evaluate()
    assert list(evaluation.sets) == ["all", "few"]
    few = evaluation.sets["few"]
    assert few.params == SamplingParams(n=4, max_tokens=8, seed=few.params.seed, **of_evaluation)
    assert [len(item.completions) for item in few.items] == [4] * 3
    assert max(each.num_tokens for item in few.items for each in item.completions) <= 8
    assert few.items == evaluation.sets["all"].items[:3]
    assert {"pass@1", "pass@2", "pass@4", "reward", "rewards/count_a/mean"} <= set(few.estimates)
    assert evaluation.metrics["few_pass@4"] == few.estimates["pass@4"].value
    trainer.train()
    [line] = [line for line in lines_of(tmp_path) if "eval_few_pass@1" in line]
    assert line["step"] == 2
    assert {"eval_all_reward", "eval_all_reward_low", "eval_few_pass@4_high"} <= set(line)
    written = read_items(tmp_path / "run" / "evaluations" / "step_000002.all.jsonl")
    assert [item.prompt for item in written] == [row["prompt"] for row in PROMPTS]
    assert written[0].columns == {"gold": "a"}
    assert item_values(written[0])["pass@1"] == np.mean([each.text[:1] == "a" for each in written[0].completions])
