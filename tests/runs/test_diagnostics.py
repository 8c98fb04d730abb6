"""Each diagnosis follows from a history with its cause, and from no other."""

import json
import re

import pytest

from groupax import GRPOConfig
from groupax.core.errors import RewardError
from groupax.runs.diagnostics import (
    EARLY_STEPS,
    PATIENCE_STEPS,
    START_STEPS,
    UNSCORED_ROLLOUTS,
    logp_limit,
    num_unscored_steps,
    setup_diagnostics,
    step_diagnostics,
)
from tests.training.test_trainer import a_trainer

HEALTHY = {
    "reward": 0.5,
    "reward_std": 0.3,
    "rewards/right/mean": 0.4,
    "rewards/right/std": 0.4,
    "rewards/form/mean": 0.1,
    "rewards/form/std": 0.2,
    "frac_reward_zero_std": 0.25,
    "completions/clipped_ratio": 0.1,
    "completions/mean_length": 50.0,
    "completions/max_length": 128.0,
    "entropy": 1.0,
    "kl": 0.05,
    "learning_rate": 1e-6,
    "rollout/logp_diff_mean": 0.0,
    "time/reward_s": 0.1,
    "step_time": 2.0,
}


def a_history(num_steps=2 * START_STEPS, **late):
    """A healthy start, and steps at the end where some metrics are otherwise; those of `slashed` names by _."""
    named = {name: next((key for key in HEALTHY if key.replace("/", "_") == name), name) for name in late}
    changed = {named[name]: value for name, value in late.items()}
    return [{**HEALTHY, **(changed if step >= num_steps - START_STEPS else {})} for step in range(num_steps)]


def test_in_float32_engine_and_trainer_agree_more_closely():
    history = a_history(rollout_logp_diff_mean=2e-5)
    assert step_diagnostics(history) == {}
    limit = logp_limit(GRPOConfig(), is_float32=True)
    assert "by 2e-05 on average (rollout/logp_diff_mean, above 1e-05)" in step_diagnostics(history, limit)["logp_drift"]
    for args in (GRPOConfig(kv_cache_dtype="bfloat16"), GRPOConfig(rollout_servers=("http://a:1",))):
        assert logp_limit(args, is_float32=True) == logp_limit(GRPOConfig(), is_float32=False) == 0.05


def test_a_healthy_history_has_no_diagnostic():
    assert step_diagnostics([]) == step_diagnostics(a_history(3)) == step_diagnostics(a_history()) == {}
    grown = a_history(entropy=0.01, reward=0.9, kl=0.5, rewards_right_mean=0.9, completions_mean_length=120.0)
    assert step_diagnostics(grown) == {}
    assert step_diagnostics(a_history(frac_reward_zero_std=0.9, reward=0.95, reward_std=0.1)) == {}


@pytest.mark.parametrize(
    ("late", "name", "text"),
    [
        ({"frac_reward_zero_std": 1.0}, "rewards_equal", "check the reward function"),
        ({"filter/filled_up_frac": 0.6}, "filter_budget", "too easy or too hard"),
        ({"completions_clipped_ratio": 1.0}, "all_truncated", r"max_completion_length \(128 tokens\); raise it"),
        ({"completions_clipped_ratio": 1.0, "stop/max_turns": 0.75, "stop/length": 0.25}, "all_truncated",
         r"ended every episode \(max_turns 75%, length 25%\); raise max_turns"),
        ({"stop/env_error": 0.05, "stop/timeout": 0.25}, "environment_failures",
         "more than 20% of the episodes.*5% failed and those of 25% took longer than tool_timeout_s"),
        ({"tools/failure_frequency": 1.0}, "tool_failures", "every call of a tool failed"),
        ({"kl": 1.5}, "kl_runaway", "now 1.5.*lower learning_rate, raise beta"),
        ({"rollout_logp_diff_mean": 0.06}, "logp_drift", "by 0.06 on average.*set rollout_correction"),
        ({"learning_rate": 0.0}, "learning_rate_zero", "learning_rate_end"),
        ({"time_reward_s": 1.0}, "slow_reward", r"waited 5\.0 s of 10\.0 s.*reward_workers"),
        ({"entropy": 0.05}, "entropy_collapse", "from 1 to 0.05 nats.*raise epsilon_high"),
        ({"frac_reward_zero_std": 0.7}, "signal_lost", r"in 70% .*\(25% at the start\).*from 1 to 1 nats.*coef"),
        ({"rewards_right_mean": 0.1, "rewards_form_mean": 0.4}, "reward_hacking",
         "'form' has risen while 'right' has fallen.*reward_weights"),
        ({"completions_mean_length": 110.0, "completions_clipped_ratio": 0.6}, "length_explosion",
         r"from 50 to 110 tokens, and 60% of them are cut off \(10% at the start\)"),
        ({"completions_mean_length": 15.0}, "length_collapse", "from 50 to 15 tokens.*with the highest reward"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else "",
)  # fmt: skip
def test_what_is_off_is_found_with_cause_and_remedy(late, name, text):
    diagnostics = step_diagnostics(a_history(**late))
    assert set(diagnostics) == {name}
    assert re.search(text, diagnostics[name])


def test_a_gradient_of_zero_is_found_with_its_cause():
    dead = {**HEALTHY, "grad_norm": 0.0, "frac_reward_zero_std": 1.0, "reward": 0.0}
    alive = {**HEALTHY, "grad_norm": 0.4}
    found = step_diagnostics([alive, *[dead] * PATIENCE_STEPS])
    assert set(found) == {"no_gradient"}, "a broken policy, not a bad reward function"
    assert re.search("the mean reward fell from 0.5 to 0.*lower learning_rate", found["no_gradient"])
    assert "no_gradient" not in step_diagnostics([alive, *[dead] * (PATIENCE_STEPS - 1)])
    assert set(step_diagnostics([alive, *[{**dead, "reward": 1.0}] * PATIENCE_STEPS])) == {"rewards_equal"}, "solved"
    assert set(step_diagnostics([dead] * 30)) == {"rewards_equal"}  # never differed
    masked = {**HEALTHY, "grad_norm": 0.0}
    found = step_diagnostics([masked] * PATIENCE_STEPS)
    assert re.search("although rewards differ.*mask_truncated_completions", found["no_gradient"])


def test_an_early_collapse_of_the_entropy_is_found_unless_the_reward_has_risen():
    late = {**HEALTHY, "entropy": 0.09}
    history = [*[HEALTHY] * EARLY_STEPS, *[late] * PATIENCE_STEPS]
    assert "from 1 to 0.09 nats" in step_diagnostics(history)["entropy_collapse"]
    assert step_diagnostics(history[1:]) == {}
    assert step_diagnostics([*[HEALTHY] * EARLY_STEPS, *[{**late, "reward": 0.6}] * PATIENCE_STEPS]) == {}
    assert step_diagnostics([*[HEALTHY] * EARLY_STEPS, *[{**late, "entropy": 0.12}] * PATIENCE_STEPS]) == {}


@pytest.mark.parametrize(
    ("settings", "name", "text"),
    [
        ({"prompts_per_step": 4000}, "few_prompts", "takes 4,000 prompts.*has 800, so each is sampled 5 times"),
        ({"learning_rate": 0.0}, "learning_rate_zero", ""),
        (
            {"loss_type": "dapo", "importance_sampling_level": "sequence"},
            "sequence_weights",
            "by its completion length",
        ),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, None, ""),
        ({"delta": 4.0}, None, ""),
    ],
)
def test_what_is_off_before_the_first_step(settings, name, text):
    found = setup_diagnostics(GRPOConfig(**settings), [1], 800)
    assert set(found) == ({name} if name else set())
    assert re.search(text, found.get(name, ""))
    assert set(setup_diagnostics(GRPOConfig(), [])) == {"no_eos"}


def test_steps_without_any_reward_are_told_at_once_and_not_as_equal_rewards():
    unscored = {**HEALTHY, "frac_reward_zero_std": 1.0, "reward": float("nan"), "rewards/unscorable_frac": 1.0}
    history = [*a_history(1), unscored]
    assert num_unscored_steps(history) == 1
    assert "'right' and 'form' returned None for every one" in step_diagnostics(history)["no_rewards"]
    assert set(step_diagnostics(history * PATIENCE_STEPS)) == {"no_rewards"}
    mixed = [{**unscored, "reward": 0.25, "rewards/unscorable_frac": 0.0}] * (PATIENCE_STEPS - 1) + [unscored]
    assert "(mean 0.25)" in step_diagnostics(mixed)["rewards_equal"]
    assert num_unscored_steps(a_history()) == num_unscored_steps([]) == 0


@pytest.mark.heavy
def test_a_run_without_any_reward_ends_and_says_why(tmp_path, caplog):
    def nothing(completions):
        return [None] * len(completions)

    with pytest.raises(RewardError, match=rf"steps 1 to {UNSCORED_ROLLOUTS} .*\('nothing',?\) returned None"):
        a_trainer(tmp_path, nothing, max_steps=5).train()
    assert "same reward" not in caplog.text
    assert [each["step"] for each in found(tmp_path) if each["name"] == "no_rewards"] == [1]


def found(folder):
    return [json.loads(line) for line in (folder / "run" / "diagnostics.jsonl").read_text().splitlines()]


@pytest.mark.heavy
def test_diagnostics_are_told_once_on_disk_and_in_every_line_of_metrics(tmp_path, caplog):
    a_trainer(tmp_path, lambda completions: [1.0] * len(completions), max_steps=PATIENCE_STEPS + 2).train()
    [diagnostic] = [each for each in found(tmp_path) if each["name"] == "rewards_equal"]
    assert diagnostic["step"] == PATIENCE_STEPS
    assert caplog.text.count(diagnostic["text"]) == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("health/rewards_equal", 0.0) for line in lines] == [0.0] * 4 + [1.0] * 3
    assert [line["health/num_diagnostics"] for line in lines] == [0.0] * 4 + [float(len(found(tmp_path)))] * 3
