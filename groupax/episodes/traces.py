"""Token-exact traces of episodes, in the shape of OpenEnv's `TrainingTrace`, out and in. Imports no jax.

A trace is {"schema_version": 1, "turns": [...]}, and a turn has `node_id`, `prompt_token_ids`, `completion_token_ids`,
`per_token_logps` of the completion, a `loss_mask` for the prompt and the completion, and `metadata`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from groupax.core.types import Rollout
from groupax.episodes.branches import SampledTurn, streams_of
from groupax.episodes.custom import RolloutFunction, RolloutRequest, Trajectory
from groupax.events import Event, RolloutScored
from groupax.parallel import processes

Trace = dict[str, Any]


def trace_of(rollout: Rollout) -> Trace:
    """Returns an episode as a trace, a turn for each of its turns that counts.

    The log-probs are those of the distribution that was drawn from, with which importance correction works. Metadata of
    the first turn are the rewards, the end, and the version of the weights.
    """
    turns = [turn for stream in (rollout, *rollout.branches) for turn in _turns(stream)]
    about = {
        "rewards": dict(rollout.rewards),
        "reward": rollout.environment_reward,
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
    }
    entries = [
        {**turn, "node_id": f"turn{number:05d}", "metadata": {} if number else about}
        for number, turn in enumerate(turns)
    ]
    return {"schema_version": 1, "turns": entries}


def _turns(stream: Any) -> Iterator[Trace]:
    """Yields the runs of tokens of a stream that count, each as a turn."""
    whole, start = np.concatenate([stream.prompt_ids, stream.completion_ids]), len(stream.prompt_ids)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], stream.mask, [False]]).astype(np.int8)))
    for first, end in edges.reshape(-1, 2).tolist():
        yield {
            "prompt_token_ids": whole[: start + first].tolist(),
            "completion_token_ids": whole[start + first : start + end].tolist(),
            "per_token_logps": stream.sampler_logps[first:end].tolist(),
            "loss_mask": [0] * (start + first) + [1] * (end - first),
        }


def turns_of(trace: Mapping[str, Any]) -> list[SampledTurn]:
    """Returns the turns of a trace."""
    if trace.get("schema_version") != 1 or not isinstance(trace.get("turns"), list):
        raise ValueError("a trace must have schema_version 1 and a list of turns, as OpenEnv's TrainingTrace")
    return [_turn(given, number) for number, given in enumerate(trace["turns"])]


def _turn(given: Mapping[str, Any], number: int) -> SampledTurn:
    try:
        prompt, tokens = list(given["prompt_token_ids"]), list(given["completion_token_ids"])
        logps, mask = [float(each) for each in given["per_token_logps"]], [int(each) for each in given["loss_mask"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"turn {number} of a trace has no token ids, log-probs or mask: {error!r}") from error
    sizes = len(tokens), len(logps), len(mask) - len(prompt)
    if not prompt or not tokens or len({*sizes}) > 1:
        raise ValueError(
            f"turn {number} of a trace has {len(prompt)} tokens of the prompt, {sizes[0]} after it, {sizes[1]} "
            f"log-probs and a mask of {len(mask)}; there must be some, one log-prob for each after the prompt, and a "
            "mask for all"
        )
    if any(mask[: len(prompt)]) or not {*mask} <= {0, 1}:
        raise ValueError(f"the mask of turn {number} of a trace must be 0 for its prompt, and 0 or 1 after it")
    counts = np.asarray(mask[len(prompt) :], bool)
    return SampledTurn(np.asarray(prompt, np.int32), tokens, logps, logps, mask=counts, number=number)


def trajectory_of(trace: Mapping[str, Any]) -> Trajectory:
    """Returns a trace as a trajectory, whose column `trace_reward` is its recorded reward."""
    turns = turns_of(trace)
    if not turns:
        raise ValueError("a trace has no turns, so that there is nothing to train on")
    first, *others = streams_of(turns)
    reward = (trace["turns"][0].get("metadata") or {}).get("reward")
    columns = {"trace_reward": None if reward is None else float(reward)}
    return Trajectory(
        first.prompt_ids, first.completion_ids, first.sampler_logps, first.mask, columns, branches=tuple(others)
    )


def trace_reward(trace_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """The reward that was recorded with a trace."""
    return list(trace_reward)


class TraceFile:
    """A listener of a run that appends its scored episodes to a file of traces, one JSON object per line.

    The metadata of a trace have the number of its group, by which `read_traces` puts the episodes of a prompt together.
    Episodes that failed are left out.

    Args:
        path: The file.

    Example:
        >>> GRPOTrainer(..., listeners=[TraceFile("traces.jsonl")])  # doctest: +SKIP
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def __call__(self, event: Event) -> None:
        """Writes the episodes of a rollout that was scored."""
        if not isinstance(event, RolloutScored) or not processes.is_primary():
            return
        with self._path.open("a") as file:
            for rollout in (each for group in event.groups for each in group if not each.is_failure):
                trace = trace_of(rollout)
                trace["turns"][0]["metadata"]["group"] = f"{event.step}/{rollout.prompt_index}"
                file.write(json.dumps(trace) + "\n")


def read_traces(path: Path | str) -> list[dict[str, Any]]:
    """Returns the traces of a file as dataset rows, one for each group, with its traces in the column `traces`.

    Raises:
        ValueError: A line is not a trace.
    """
    groups: dict[str, list[Trace]] = {}
    with Path(path).open() as file:
        for number, line in enumerate(file, 1):
            try:
                trace = json.loads(line)
                turns_of(trace)
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            about = trace["turns"][0].get("metadata") or {} if trace["turns"] else {}
            groups.setdefault(str(about.get("group", number)), []).append(trace)
    return [{"prompt": f"recorded group {group}", "traces": json.dumps(traces)} for group, traces in groups.items()]


def _recorded(request: RolloutRequest) -> list[Trajectory]:
    """Returns the recorded episodes of rows from `read_traces`, instead of sampling.

    Raises:
        ValueError: A group has fewer than the run takes.
    """
    n, found = request.params.n, []
    for row in request.examples:
        traces = json.loads(row["traces"])
        if len(traces) < n:
            raise ValueError(f"{row['prompt']} has {len(traces)} traces, and num_generations is {n}; lower it")
        found += map(trajectory_of, traces[:n])
    return found


recorded_rollouts = RolloutFunction(_recorded, columns=["trace_reward"], is_recorded=True)
