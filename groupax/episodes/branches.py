"""The token streams of an episode whose program asks for turns as it likes. Imports no jax.

A turn whose prompt begins with the stream of an earlier turn, up to its last sampled token, continues that turn. All
other turns begin a stream of their own: a program may rewrite its history, or have several conversations.

turns   a ──► b ──► c          streams   a b c
              └───► d                    a b d   (a and b are masked: they count once)
        e                                e
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupax.core.types import Branch, FinishReason, Rollout, Turn
from groupax.data.examples import with_values
from groupax.episodes.as_json import DTYPES
from groupax.tools.calls import answered_calls

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, eq=False)
class SampledTurn:
    """A turn that was sampled.

    Attributes:
        prompt_ids: Token ids of everything before it.
        tokens: Its token ids, at least one.
        policy_logps, sampler_logps: Log-probs of its tokens (see `Rollout`).
        text: Its decoded text.
        mask: Which of its tokens count in the loss; None for all.
        messages: Messages of the request, and the assistant's message; empty for a prompt that is a text.
        number: Number of its request in the episode.
    """

    prompt_ids: np.ndarray
    tokens: Sequence[int]
    policy_logps: Sequence[float]
    sampler_logps: Sequence[float]
    text: str = ""
    mask: np.ndarray | None = None
    messages: Messages = ()
    number: int = 0

    @property
    def stream(self) -> np.ndarray:
        """Token ids of its prompt and its own."""
        return np.concatenate([self.prompt_ids, np.asarray(self.tokens, np.int32)])


def rollout_of(
    turns: Sequence[SampledTurn],
    index: tuple[int, int],
    example: Mapping[str, Any],
    prompt_ids: np.ndarray,
    finish_reason: FinishReason,
    reward: float | None,
    policy_version: int,
) -> Rollout:
    """Returns the rollout of a run, without its text.

    Its own tokens are those of the stream with the most turns; the other streams are its branches.
    """
    if not turns:
        # a token that counts nowhere, since a rollout has at least one
        turns = [SampledTurn(prompt_ids, [int(prompt_ids[-1]) if len(prompt_ids) else 0], [0.0], [0.0])]
    main, *others = streams_of(turns)
    *earlier, last = main.turns
    return Rollout(
        prompt_index=index[0],
        sample_index=index[1],
        example=example if main.prompt is None else with_values(example, {"prompt": list(main.prompt)}),
        finish_reason=finish_reason,
        policy_version=policy_version,
        text="",
        turns=(*earlier, replace(last, reward=float(reward or 0.0))),
        messages=main.messages,
        environment_reward=reward,
        branches=tuple(others),
        **{name: getattr(main, name) for name in DTYPES},
    )


def streams_of(turns: Sequence[SampledTurn]) -> list[Branch]:
    """Returns the token streams of an episode, the one with the most turns first.

    The order, and therefore the stream in which a shared turn counts, depends on the tokens alone, and not on the order
    in which parallel requests arrived. Streams in which no token counts are left out, except if there are no others.
    """
    parents = parents_of(turns)
    paths = []
    inner = set(parents)
    for leaf in (index for index in range(len(turns)) if index not in inner):
        path, index = [], leaf
        while index is not None:
            path.append(turns[index])
            index = parents[index]
        paths.append(path[::-1])
    paths.sort(key=lambda path: (-len(path), -sum(len(turn.tokens) for turn in path), path[-1].stream.tobytes()))
    counted: set[int] = set()
    streams = [_stream(path, counted) for path in paths]
    return [each for each in streams if each.mask.any()] or streams[:1]


def parents_of(turns: Sequence[SampledTurn]) -> list[int | None]:
    """Returns the index of the turn that each one continues; None for the first turn of a stream."""
    streams = [turn.stream for turn in turns]
    by_length = sorted(range(len(turns)), key=lambda index: -len(streams[index]))

    def continues(turn: SampledTurn, other: int) -> bool:
        size = len(streams[other])
        is_shorter = turns[other] is not turn and size <= len(turn.prompt_ids)
        return is_shorter and np.array_equal(streams[other], turn.prompt_ids[:size])

    return [next((other for other in by_length if continues(turn, other)), None) for turn in turns]


def _stream(path: Sequence[SampledTurn], counted: set[int]) -> Branch:
    """Returns the stream of a path of turns, which are added to those that were counted, by identity."""
    start = len(path[0].prompt_ids)
    ids = path[-1].stream[start:]
    mask = np.zeros(len(ids), bool)
    policy_logps, sampler_logps = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
    spans = []
    for turn, after in zip(path, (*path[1:], None), strict=True):
        span = slice(len(turn.prompt_ids) - start, len(turn.prompt_ids) - start + len(turn.tokens))
        mask[span] = (True if turn.mask is None else turn.mask) if id(turn) not in counted else False
        policy_logps[span], sampler_logps[span] = turn.policy_logps, turn.sampler_logps
        answers = () if after is None else after.messages[len(turn.messages) :]
        calls = answered_calls(turn.messages[-1], answers) if turn.messages else ()
        spans.append(Turn(span.start, span.stop, turn.text, calls))
        counted.add(id(turn))
    zero = np.float32(0.0)
    messages, num_read = path[-1].messages, len(path[0].messages) - 1
    return Branch(
        path[0].prompt_ids,
        ids,
        np.where(mask, policy_logps, zero),
        np.where(mask, sampler_logps, zero),
        mask,
        tuple(spans),
        messages=messages[num_read:] if messages else None,
        prompt=messages[:num_read] if messages else None,
    )
