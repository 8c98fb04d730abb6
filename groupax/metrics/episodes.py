"""Metrics of episodes with tools and environments: turns, calls, and why episodes end. Imports no jax."""

from collections import Counter
from collections.abc import Sequence

from groupax.types import Metrics, Rollout


def episode_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Returns the mean number of turns, calls per episode, the fraction of calls that failed, and that of each end.

    Names of calls are TRL's: `tools/call_frequency` is the number of calls per episode, and `tools/failure_frequency`
    the fraction of the calls that failed.
    """
    calls = [call for rollout in rollouts for turn in rollout.turns for call in turn.calls]
    ends = Counter(rollout.finish_reason for rollout in rollouts)
    return {
        "episodes/turns": sum(len(rollout.turns) for rollout in rollouts) / len(rollouts),
        "tools/call_frequency": len(calls) / len(rollouts),
        "tools/failure_frequency": sum(bool(call.error) for call in calls) / max(len(calls), 1),
        "tools/seconds": sum(call.seconds for call in calls) / max(len(calls), 1),
        **{f"stop/{reason}": count / len(rollouts) for reason, count in sorted(ends.items())},
    }
