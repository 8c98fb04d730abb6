"""Turns the turns of a program's run into a rollout. Imports no jax."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from groupax.episodes.branches import SampledTurn, Stream, streams_of
from groupax.types import CallRecord, FinishReason, Rollout


def rollout_of(
    turns: Sequence[SampledTurn],
    index: tuple[int, int],
    example: Mapping[str, Any],
    prompt_ids: np.ndarray,
    finish_reason: FinishReason,
    reward: float | None,
    policy_version: int,
    has_branches: bool = True,
) -> Rollout:
    """Returns the rollout of a run, without its text.

    Its own tokens are those of the stream with the most turns; the other streams are its branches.

    Args:
        turns: The turns that count; a run that failed may have none.
        index: Indices of its prompt and of its sample.
        example: Dataset row with the prompt, in place of which the rollout has what the model has read first.
        prompt_ids: Prompt of a run without turns.
        finish_reason: Reason of its end.
        reward: Its reward; None for none.
        policy_version: Version of the weights that sampled it.
        has_branches: Whether it has branches.
    """
    if not turns:
        # a token that counts nowhere, since a rollout has at least one
        turns = [SampledTurn(prompt_ids, [int(prompt_ids[-1]) if len(prompt_ids) else 0], [0.0], [0.0])]
    first, *others = streams_of(turns)
    spans = [
        replace(span, calls=_calls(turn, after))
        for span, turn, after in zip(first.spans, first.path, (*first.path[1:], None), strict=True)
    ]
    if reward is not None:
        spans[-1] = replace(spans[-1], reward=float(reward))
    messages = first.path[-1].messages
    num_read = len(first.path[0].messages) - 1
    return Rollout(
        prompt_index=index[0],
        sample_index=index[1],
        example={**example, "prompt": list(messages[:num_read])} if messages else example,
        finish_reason=finish_reason,
        policy_version=policy_version,
        text="",
        turns=tuple(spans),
        messages=messages[num_read:] if messages else None,
        environment_reward=reward,
        branches=tuple(each.branch for each in others) if has_branches else (),
        **_tokens(first),
    )


def _tokens(stream: Stream) -> dict[str, Any]:
    return vars(stream.branch)


def _calls(turn: SampledTurn, after: SampledTurn | None) -> tuple[CallRecord, ...]:
    """Returns the calls of a turn that the program has answered before the next one."""
    if after is None or not turn.messages:
        return ()
    new = after.messages[len(turn.messages) :]
    results = {message.get("tool_call_id"): message for message in new if message["role"] == "tool"}
    calls = [call for call in turn.messages[-1].get("tool_calls", ()) if call["id"] in results]
    return tuple(
        CallRecord(
            call["function"]["name"], call["function"]["arguments"], str(results[call["id"]].get("content") or ""), 0.0
        )
        for call in calls
    )
