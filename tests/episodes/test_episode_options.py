"""Runs with tools and an environment under the other options of a run."""

import json

import pytest

from . import episodes_run

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore:environment 'Game' failed")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return episodes_run.save_start(tmp_path_factory.mktemp("start") / "model")


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained(model, folder, **settings):
    """The lines of a run's steps, and its trainer."""
    trainer = episodes_run.make_trainer(model, folder, **settings)
    trainer.train()
    return [line for line in lines_of(folder) if "loss" in line], trainer


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"lora_r": 2, "base_weights": "nf4", "eval_steps": 1, "prefix_cache_gb": 0.0},
        pytest.param({"max_staleness": 1, "rollout_correction": "token_truncate"}, marks=pytest.mark.long),
        {
            "filter_zero_variance": True,
            "filter_budget": 2.0,
            "num_iterations": 2,
            "beta": 0.1,
            "decoding_weights": "bfloat16",
            "rollout_correction": "token_truncate",
        },
    ],
    ids=str,
)
def test_episodes_are_trained_on_with(model, tmp_path, settings):
    lines, trainer = trained(model, tmp_path / "run", **settings)
    assert len(lines) == 2
    assert (trainer.engine.prefixes.num_reused_tokens > 0) == ("prefix_cache_gb" not in settings)
    for line in lines:
        assert line["tools/call_frequency"] > 0
        assert line["episodes/turns"] > 1
        assert sum(value for name, value in line.items() if name.startswith("stop/")) == pytest.approx(1)
        if "decoding_weights" not in settings:
            assert line["rollout/logp_diff_max"] < (1e-5 if line["rollout/staleness"] == 0 else 0.1)
    if settings.get("eval_steps"):
        evaluated = [line for line in lines_of(tmp_path / "run") if "eval_reward" in line]
        assert {"eval_episodes/turns", "eval_tools/call_frequency", "eval_rewards/Game/mean"} <= set(evaluated[-1])
