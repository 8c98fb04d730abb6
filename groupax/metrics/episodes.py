"""Metrics of episodes with tools and environments: turns, calls, and why episodes end. Imports no jax."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from groupax.types import EpisodeEnd, Metrics, Rollout, Turn


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
