"""Turns the turns of a program's run into a rollout. Imports no jax."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from groupax.data.examples import with_values
from groupax.episodes.as_json import DTYPES
from groupax.episodes.branches import SampledTurn, Stream, streams_of
from groupax.types import Branch, CallRecord, FinishReason, Rollout, Turn

Messages = tuple[Mapping[str, Any], ...]


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
    spans = _spans(first)
    if reward is not None:
        spans[-1] = replace(spans[-1], reward=float(reward))
    read, messages = _messages(first)
    return Rollout(
        prompt_index=index[0],
        sample_index=index[1],
        example=example if read is None else with_values(example, {"prompt": list(read)}),
        finish_reason=finish_reason,
        policy_version=policy_version,
        text="",
        turns=tuple(spans),
        messages=messages,
        environment_reward=reward,
        branches=tuple(map(_branch, others)) if has_branches else (),
        adapter=first.branch.adapter,
        **{name: getattr(first.branch, name) for name in DTYPES},
    )


def _branch(stream: Stream) -> Branch:
    read, messages = _messages(stream)
    return replace(stream.branch, turns=tuple(_spans(stream)), messages=messages, prompt=read)


def _messages(stream: Stream) -> tuple[Messages | None, Messages | None]:
    """Returns what the model has read first, and the messages after that; None twice for a prompt that is a text."""
    messages = stream.path[-1].messages
    num_read = len(stream.path[0].messages) - 1
    return (messages[:num_read], messages[num_read:]) if messages else (None, None)


def _spans(stream: Stream) -> list[Turn]:
    """Returns the turns of a stream with their calls."""
    return [
        replace(span, calls=_calls(turn, after))
        for span, turn, after in zip(stream.spans, stream.path, (*stream.path[1:], None), strict=True)
    ]


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
