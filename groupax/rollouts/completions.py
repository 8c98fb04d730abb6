"""Metrics of a step: pure functions from records to numbers by name. Imports no jax."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import numpy as np

from groupax.core.settings.objective import MultiObjectiveAggregation, ScaleRewards
from groupax.core.settings.run import MetricDefinitions
from groupax.core.types import TRUNCATIONS, EpisodeEnd, Metrics, Rollout, Turn
from groupax.objective.advantages import Advantages
from groupax.rewards.runner import Scored
from groupax.rollouts.estimates import pass_at_k, powers_up_to


def completion_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Computes lengths in sampled tokens, of all completions and of untruncated ones, and the truncated fraction.

    `rollout/sampler_gap_mean` is the mean by which truncated sampling (top-p and so on) raised the sampled log-probs.
    """
    if not rollouts:
        return dict.fromkeys(_COMPLETION_METRICS, float("nan"))
    lengths = np.array([row.num_sampled_tokens for row in rollouts])
    stopped = np.array([row.finish_reason not in TRUNCATIONS for row in rollouts])
    metrics = {f"completions/{kind}_length": float(f(lengths)) for kind, f in _SUMMARIES.items()}
    terminated = lengths[stopped] if stopped.any() else np.zeros(1)
    metrics |= {f"completions/{kind}_terminated_length": float(f(terminated)) for kind, f in _SUMMARIES.items()}
    streams = [stream for row in rollouts for stream in (row, *row.branches)]
    gaps = np.concatenate([(each.sampler_logps - each.policy_logps)[each.mask] for each in streams])
    return metrics | {
        "completions/clipped_ratio": float(1.0 - stopped.mean()),
        "rollout/sampler_gap_mean": float(gaps.mean()),
    }


_SUMMARIES = {"mean": np.mean, "min": np.min, "max": np.max}
_COMPLETION_METRICS = (
    *(f"completions/{kind}{which}_length" for kind in _SUMMARIES for which in ("", "_terminated")),
    "completions/clipped_ratio",
    "rollout/sampler_gap_mean",
)


def reward_metrics(names: Sequence[str], rewards: np.ndarray, advantages: Advantages) -> Metrics:
    """Returns the mean and spread of each reward and of their weighted sum.

    `reward_std` is the standard deviation (ddof 1) over all completions, `reward_group_std` the mean of the groups'.
    """
    metrics: Metrics = {}
    for name, column in zip(names, rewards.T, strict=True):
        known = column[~np.isnan(column)]
        metrics[f"rewards/{name}/mean"] = float(known.mean()) if known.size else float("nan")
        metrics[f"rewards/{name}/std"] = float(known.std(ddof=1)) if known.size > 1 else 0.0
    scorable = advantages.rewards[~np.isnan(advantages.rewards)]
    return metrics | {
        "reward": float(scorable.mean()) if scorable.size else float("nan"),
        "reward_std": float(scorable.std(ddof=1)) if scorable.size > 1 else 0.0,
        "reward_group_std": float(advantages.group_std.mean()),
        "frac_reward_zero_std": float(advantages.zero_std.mean()),
        "rewards/unscorable_frac": 1.0 - scorable.size / max(len(rewards), 1),
    }


def trl_zero_std_frac(
    advantages: Advantages, scale: ScaleRewards, aggregation: MultiObjectiveAggregation
) -> dict[str, float]:
    """Returns `frac_reward_zero_std` as TRL 1.16 defines it, by the standard deviation that advantages are divided by.

    With a deviation per group it is the fraction of groups where that is 0, without groups of fewer than two rewards.
    With one deviation over the batch it is 1 if that is 0, and 0 otherwise.
    """
    known = ~np.isnan(advantages.rewards)
    if aggregation == "normalize_then_sum":
        frac = float(advantages.zero_std.all())
    elif scale == "batch":
        rewards = advantages.rewards[known]
        frac = float(rewards.size > 1 and rewards.std(ddof=1) <= 1e-8)
    else:
        num_known = known.reshape(len(advantages.zero_std), -1).sum(axis=1)
        frac = float((advantages.zero_std & (num_known > 1)).mean())
    return {"frac_reward_zero_std": frac}


def solved_metrics(rewards: np.ndarray) -> Metrics:
    """Computes pass@k for k = 1, 2, 4, ..., G, and the fractions of groups that are solved always or never."""
    G = rewards.shape[1]
    right = [int(count) for count in (rewards[~np.isnan(rewards).any(axis=1)] == 1.0).sum(axis=1)]
    values = {f"pass@{k}": [pass_at_k(G, count, k) for count in right] for k in powers_up_to(G)}
    values["groups/all_right_frac"] = [float(count == G) for count in right]
    values["groups/all_wrong_frac"] = [float(count == 0) for count in right]
    return {name: float(np.mean(each)) if each else float("nan") for name, each in values.items()}


def logged_metrics(rounds: Sequence[Scored]) -> Metrics:
    """Returns the numbers that reward functions logged over the rounds of a rollout, as means over all calls."""
    calls: dict[str, list[float]] = {}
    for scored in rounds:
        for name, values in scored.logged.items():
            calls.setdefault(name, []).extend(values)
    return {name: float(np.mean(values)) for name, values in calls.items()}


def with_logged(own: Mapping[str, float], logged: Mapping[str, float]) -> Metrics:
    """Adds numbers that reward functions logged to a run's own metrics, under `logged/` if the name is taken."""
    return {**own, **{f"logged/{name}" if name in own else name: value for name, value in logged.items()}}


def json_numbers(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Returns metrics for JSON, with null for numbers that are not finite."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def window_mean(window: Sequence[Mapping[str, float]], definitions: MetricDefinitions = "groupax") -> Metrics:
    """Merges the metrics of several steps: means, but the extremes of extremes and the last value of counters.

    TRL also averages extremes. A step without a value (NaN), such as the mean of a reward that applied to none of its
    prompts, is left out.
    """
    if len(window) == 1:
        return {name: float(value) for name, value in window[0].items()}
    merged: Metrics = {}
    for name in dict.fromkeys(name for metrics in window for name in metrics):
        values = [metrics[name] for metrics in window if name in metrics]
        values = [value for value in values if not np.isnan(value)] or values
        kind = name.rpartition("/")[2]
        if name in ("step", "epoch", "num_tokens", "learning_rate") or name.startswith("compile/"):
            merged[name] = values[-1]
        elif definitions != "trl" and (kind.startswith("min_") or kind.endswith("_min")):
            merged[name] = min(values)
        elif definitions != "trl" and (kind.startswith("max_") or kind.endswith("_max")):
            merged[name] = max(values)
        else:
            merged[name] = float(np.mean(values))
    return merged


def episode_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Returns the mean number of turns, calls per episode, the fraction of calls that failed, and that of each end.

    `episodes/streams` is the number of streams of tokens of an episode, and `episodes/turns_per_stream` that of the
    turns of a stream, in each of which a turn counts that several continue.

    Only the fractions of the ends include episodes that failed by no fault of the model.

    Names of calls are TRL's: `tools/call_frequency` is the number of calls per episode, and `tools/failure_frequency`
    the fraction of the calls that failed.
    """
    counted = [rollout for rollout in rollouts if not rollout.is_failure]
    num_counted = max(len(counted), 1)
    turns = [turn for rollout in counted for turn in _turns(rollout)]
    calls = [call for turn in turns for call in turn.calls]
    streams = [stream for rollout in counted for stream in (rollout, *rollout.branches)]
    ends = Counter(rollout.finish_reason for rollout in rollouts)
    return {
        "episodes/turns": len(turns) / num_counted,
        "episodes/streams": len(streams) / num_counted,
        "episodes/turns_per_stream": sum(len(stream.turns) for stream in streams) / max(len(streams), 1),
        "tools/call_frequency": len(calls) / num_counted,
        "tools/failure_frequency": sum(bool(call.error) for call in calls) / max(len(calls), 1),
        "tools/seconds": sum(call.seconds for call in calls) / max(len(calls), 1),
        **{f"stop/{reason}": ends[reason] / len(rollouts) for reason in get_args(EpisodeEnd)},
    }


def _turns(rollout: Rollout) -> Iterator[Turn]:
    """Yields each turn of an episode once: in the stream in which it counts."""
    yield from rollout.turns
    for branch in rollout.branches:
        yield from (turn for turn in branch.turns if branch.mask[turn.start : turn.end].any())


MAX_STEPS = 10  # of the start and of the end


def first_and_last(values: Sequence[float]) -> tuple[float, float, int]:
    """Returns the means of the first and of the last values, and how many each is of: at most half of all.

    Args:
        values: The values in their order, at least one.
    """
    num = max(1, min(MAX_STEPS, len(values) // 2))
    return sum(values[:num]) / num, sum(values[-num:]) / num, num
