"""What is reported of a step: pure functions from records to numbers by name. Imports no jax."""

from collections.abc import Mapping, Sequence

import numpy as np

from groupax.objective.advantages import Advantages
from groupax.rollout import Rollout

Metrics = dict[str, float]


def completion_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Lengths in tokens, of all completions and of those that ended by themselves, and the share that did not."""
    lengths = np.array([len(row.completion_ids) for row in rollouts])
    stopped = np.array([row.finish_reason == "stop" for row in rollouts])
    metrics = {f"completions/{kind}_length": float(f(lengths)) for kind, f in _SUMMARIES.items()}
    terminated = lengths[stopped] if stopped.any() else np.zeros(1)
    metrics |= {f"completions/{kind}_terminated_length": float(f(terminated)) for kind, f in _SUMMARIES.items()}
    return metrics | {"completions/clipped_ratio": float(1.0 - stopped.mean())}


_SUMMARIES = {"mean": np.mean, "min": np.min, "max": np.max}


def reward_metrics(names: Sequence[str], rewards: np.ndarray, advantages: Advantages) -> Metrics:
    """Mean and spread of each reward and of their weighted sum.

    Args:
        names: of the K reward functions.
        rewards: [B, K], NaN where a function does not apply.
        advantages: of the same rows.
    """
    metrics: Metrics = {}
    for name, column in zip(names, rewards.T, strict=True):
        known = column[~np.isnan(column)]
        metrics[f"rewards/{name}/mean"] = float(known.mean()) if known.size else float("nan")
        metrics[f"rewards/{name}/std"] = float(known.std(ddof=1)) if known.size > 1 else 0.0
    scorable = advantages.rewards[~np.isnan(advantages.rewards)]
    return metrics | {
        "reward": float(scorable.mean()) if scorable.size else float("nan"),
        "reward_std": float(advantages.group_std.mean()),
        "frac_reward_zero_std": float(advantages.zero_std.mean()),
        "rewards/unscorable_frac": 1.0 - scorable.size / len(rewards),
    }


def is_timing(name: str) -> bool:
    """Whether a metric is measured by the clock, and so differs between two runs that are otherwise the same."""
    return name.startswith("time/") or name == "step_time" or name.endswith("_per_s")


def window_mean(window: Sequence[Mapping[str, float]]) -> Metrics:
    """One line for several steps: means, but extremes stay extremes and counters keep their last value."""
    merged: Metrics = {}
    for name in dict.fromkeys(name for metrics in window for name in metrics):
        values = [metrics[name] for metrics in window if name in metrics]
        kind = name.rpartition("/")[2]
        if name in ("step", "epoch", "num_tokens", "learning_rate"):
            merged[name] = values[-1]
        elif kind.startswith("min_") or kind.endswith("_min"):
            merged[name] = min(values)
        elif kind.startswith("max_") or kind.endswith("_max"):
            merged[name] = max(values)
        else:
            merged[name] = float(np.mean(values))
    return merged
