"""Metrics of episodes with tools and environments: turns, calls, and why episodes end. Imports no jax."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from groupax.types import EpisodeEnd, Metrics, Rollout


def episode_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Returns the mean number of turns, calls per episode, the fraction of calls that failed, and that of each end.

    Only the fractions of the ends include episodes that failed by no fault of the model.

    Names of calls are TRL's: `tools/call_frequency` is the number of calls per episode, and `tools/failure_frequency`
    the fraction of the calls that failed.
    """
    counted = [rollout for rollout in rollouts if not rollout.is_failure]
    num_counted = max(len(counted), 1)
    calls = [call for rollout in counted for turn in rollout.turns for call in turn.calls]
    ends = Counter(rollout.finish_reason for rollout in rollouts)
    return {
        "episodes/turns": sum(len(rollout.turns) for rollout in counted) / num_counted,
        "tools/call_frequency": len(calls) / num_counted,
        "tools/failure_frequency": sum(bool(call.error) for call in calls) / max(len(calls), 1),
        "tools/seconds": sum(call.seconds for call in calls) / max(len(calls), 1),
        **{f"stop/{reason}": ends[reason] / len(rollouts) for reason in get_args(EpisodeEnd)},
    }
