"""Tables keep the names of their rows and columns at every width of a terminal."""

import io

import numpy as np
import pytest
from rich.console import Console

from groupax.cli.summary import difference_table, estimate_table
from groupax.evaluation.items import Comparison
from groupax.evaluation.paired import PairedDifference
from groupax.metrics.estimates import Estimate
from groupax.runs.progress.named import sample_panel
from groupax.types import Rollout

NAMES = ("reward", "rewards/think_answer_format/mean", "rewards/think_answer_correct/mean")
REWARDS = {"think_answer_format": 1.0, "think_answer_correct": 0.0}


def printed(table, width):
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(table)
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


def estimate():
    return Estimate(0.63, 0.584, 0.671, "wilson", 500)


def comparison():
    pair = PairedDifference(0.356, 0.986, estimate(), 9.6e-92, "mcnemar", 320, 5)
    return Comparison(dict.fromkeys(NAMES, pair), 500, 0, 0)


def rollout(advantage):
    ids, logps = np.array([1, 2], np.int32), np.zeros(2, np.float32)
    more = {"text": "five " * 40, "rewards": REWARDS, "advantage": advantage}
    return Rollout(0, 0, {"prompt": "2+3?"}, ids, ids, logps, logps, "stop", 0, **more)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_names_and_values_are_whole_at_every_width(width):
    lengths = {"completions/mean_length": 12.5}
    text = printed(difference_table("eval: before and after", comparison(), lengths, lengths), width)
    assert all(name in text for name in (*NAMES, "completions/mean_length"))
    assert text.count("0.356") == text.count("0.986") == len(NAMES)
    assert text.count("0.630") == len(NAMES)
    assert "[0.584, 0.671]" in text
    assert ("9.6e-92" in text) == (width == 120)
    text = printed(estimate_table("eval", dict.fromkeys(NAMES, estimate())), width)
    assert all(name in text for name in NAMES)
    assert text.count("0.5840 to 0.6710") == len(NAMES)
    assert ("wilson" in text) == (width >= 100)


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120])
def test_completions_have_their_rewards_by_whole_names(width):
    text = printed(sample_panel(group := [rollout(advantage) for advantage in (1.5, 0.0, -1.5)]), width)
    num_mentions = 1 if width == 120 else len(group)
    assert all(text.count(name) == num_mentions for name in REWARDS)
    assert all(f"{number:+.2f}" in text for number in (1.5, 0.0, -1.5))


def test_markup_and_control_characters_in_names_are_shown():
    text = printed(estimate_table("[red]\x1b[31m", {"[bold]\x1b]0;x": estimate()}), 200)
    assert "[red]␛[31m" in text
    assert "[bold]␛]0;x" in text
