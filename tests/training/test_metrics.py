"""Metrics of rewards, against numpy and against TRL's own arithmetic."""

import numpy as np
import pytest

from groupax.metrics.completions import reward_metrics, trl_zero_std_frac
from groupax.objective.advantages import group_advantages

NAN = float("nan")
SPREAD = [[0.0], [1.0], [0.25], [0.5], [2.0], [2.0], [2.0], [2.0]]
EQUAL = [[0.5]] * 8
UNSCORED_GROUP = [[NAN]] * 4 + [[0.0], [1.0], [0.25], [0.5]]
ONE_OF_A_GROUP = [[1.0], [NAN], [NAN], [NAN], [2.0], [2.0], [2.0], [2.0]]


def metrics_of(rewards, **options):
    rewards = np.array(rewards)
    advantages = group_advantages(rewards, np.ones(rewards.shape[1]), 4, **options)
    return reward_metrics([f"f{k}" for k in range(rewards.shape[1])], rewards, advantages), advantages


def test_the_spread_of_rewards_over_the_batch_and_within_groups():
    found, _ = metrics_of(SPREAD)
    values = np.array(SPREAD)[:, 0]
    assert found["reward_std"] == pytest.approx(values.std(ddof=1))
    assert found["reward_group_std"] == pytest.approx(values[:4].std(ddof=1) / 2)
    assert found["reward_std"] == pytest.approx(found["rewards/f0/std"])
    found, _ = metrics_of(UNSCORED_GROUP)
    assert found["reward_std"] == pytest.approx(np.array(UNSCORED_GROUP)[4:, 0].std(ddof=1))
    assert metrics_of([[NAN]] * 8)[0]["reward_std"] == 0.0


def nanstd(values):
    """TRL's: of the numbers among the values, with ddof 1; not a number for fewer than two."""
    known = values[~np.isnan(values)]
    return known.std(ddof=1) if known.size > 1 else NAN


@pytest.mark.parametrize("rewards", [SPREAD, EQUAL, UNSCORED_GROUP, ONE_OF_A_GROUP], ids=["a", "b", "c", "d"])
@pytest.mark.parametrize("scale", ["group", "none", "batch", "normalize_then_sum"])
def test_groups_without_spread_as_trl_counts_them(rewards, scale):
    options = {"aggregation": scale} if scale == "normalize_then_sum" else {"scale": scale}
    totals = np.array(rewards)[:, 0]
    groups = totals.reshape(2, 4)
    if scale == "normalize_then_sum":
        spreads = np.array([[nanstd(group)] for group in groups])
        means = np.array([[group[~np.isnan(group)].mean() if not np.isnan(group).all() else NAN] for group in groups])
        normalized = np.nan_to_num((groups - means) / (spreads + 1e-4), nan=0.0)
        deviations = np.full(8, nanstd(np.where(np.isnan(totals), NAN, normalized.reshape(8))))
    elif scale == "batch":
        deviations = np.full(8, nanstd(totals))
    else:
        deviations = np.repeat([nanstd(group) for group in groups], 4)
    expected = np.isclose(deviations, 0.0).mean()
    _, advantages = metrics_of(rewards, **options)
    scale_rewards = options.get("scale", "group")
    found = trl_zero_std_frac(advantages, scale_rewards, options.get("aggregation", "sum_then_normalize"))
    assert found["frac_reward_zero_std"] == expected
