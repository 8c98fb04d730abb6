"""What came of a run: a sentence on held-out prompts, else on the training, and none on what is not there."""

import numpy as np
import pytest

from groupax.evaluation.items import Completion, Item, write_items
from groupax.runs.outcome import evaluation_files, held_out, outcome, trend
from groupax.runs.report import read_run
from tests.runs.test_run_report import run  # noqa: F401 - a fixture


def items(*solved, reward=0.0):
    made = [[Completion("", 1, "stop", {"r": reward}, reward, each) for each in group] for group in solved]
    return [Item(f"k{index}", index, "p", {}, completions) for index, completions in enumerate(made)]


NO_CURVES = lambda name: ([], [])  # noqa: E731
HALF, FULL = [[True]] * 10 + [[False]] * 10, [[True]] * 19 + [[False]]


@pytest.mark.parametrize(
    ("evaluations", "said"),
    [
        ({}, []),
        ({"before": HALF}, ["Before training pass@1 on 20 held-out prompts is 0.500 [0.299, 0.701]"]),
        ({"step_000008": HALF}, ["After step 8 pass@1 on 20 held-out prompts is 0.500 [0.299, 0.701]"]),
        ({"before": HALF, "step_000010": HALF, "step_000009": FULL}, ["After step 10 none of 20 held-out prompts"]),
        (
            {"before": HALF, "step_000012": FULL},
            ["After step 12 9 of 20 held-out prompts became right and none wrong: p"],
        ),
        (
            {"step_000002": FULL, "after": HALF},
            ["From step 2 to the end none of 20 held-out prompts became right and 9"],
        ),
        (
            {"before": [[False, True]] * 9, "after": [[True, True]] * 9},
            ["After training 9 of 9 held-out prompts are rig"],
        ),
        (
            {"before": [[None]] * 3, "after": [[None]] * 3},
            ["After training none of 3 held-out prompts earn more and no"],
        ),
    ],
)
def test_held_out_prompts_come_first(tmp_path, evaluations, said):
    (tmp_path / "evaluations").mkdir()
    for name, solved in evaluations.items():
        write_items(tmp_path / "evaluations" / f"{name}.eval.jsonl", items(*solved))
    found = held_out(evaluation_files(tmp_path))
    assert [text[: len(start)] for text, start in zip(found, said, strict=True)] == said


def test_sets_are_named_and_damaged_files_say_nothing(tmp_path):
    (tmp_path / "evaluations").mkdir()
    for name in ("before.easy", "before.hard", "after.hard"):
        write_items(tmp_path / "evaluations" / f"{name}.jsonl", items([True]))
    files = evaluation_files(tmp_path)
    assert [text.partition(" ")[0] for text in held_out(files)] == ["easy:", "hard:"]
    files["after.hard"].write_text("{}\n")
    assert [text.partition(" ")[0] for text in held_out(files)] == ["easy:"]
    assert outcome({"verdicts": {"easy": "well"}}, files, NO_CURVES) == ["well"], "what the run itself has said"


def test_a_trend_has_an_interval():
    rng, steps = np.random.default_rng(0), np.arange(1, 41)
    told = {slope: trend(steps, slope * steps + rng.normal(0, 0.1, 40), "reward") for slope in (0.0, 0.1, -0.1)}
    verbs = {slope: text.partition(":")[0].removeprefix("The reward in training ") for slope, text in told.items()}
    assert verbs == {0.0: "did not change clearly", 0.1: "rose", -0.1: "fell"}
    assert "in steps 1 to 10" in told[0.1]
    assert "rose: 0.000 in steps 1 to 3, 1.000 in steps 4 to 6 (difference +1.000, 95 % interval +1.000 to +1.000)" in (
        trend([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0] * 3 + [1.0] * 3, "reward")
    )
    assert trend([1.0, 2.0], [0.5, float("nan")], "reward").startswith("After step 1 the reward is 0.500, too early")
    assert trend([1.0], [float("nan")], "reward") == ""
    unscored = {"reward": ([1.0], [float("nan")]), "loss": ([1.0], [0.5])}
    assert outcome({}, {}, unscored.get) == [], "the loss says nothing about GRPO"


def test_supervised_runs_say_their_loss_on_held_out_examples():
    curves = {"eval_loss": ([0.0, 5.0, 9.0], [2.0, 1.0, 1.5]), "eval_b_loss": ([5.0], [3.0]), "loss": ([1.0], [2.0])}
    one, several = outcome({}, {}, lambda name: curves.get(name, ([], [])), curves)
    assert one == "After step 5 eval_b_loss on held-out examples is 3.000"
    fell = "eval_loss on held-out examples fell: 2.000 after step 0, 1.500 after step 9"
    assert several == f"{fell}; it was lowest, 1.000, after step 5"


def test_a_report_begins_with_it(run):  # noqa: F811
    [text] = read_run(run).outcome
    assert text.startswith("From step 2 to step 4")
