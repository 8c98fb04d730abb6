"""The token streams of an episode whose program asks for turns as it likes. Imports no jax.

A turn whose prompt begins with the stream of an earlier turn, up to its last sampled token, continues that turn. All
other turns begin a stream of their own: a program may rewrite its history, or have several conversations.

turns   a ──► b ──► c          streams   a b c
              └───► d                    a b d   (a and b are masked: they count once)
        e                                e
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupax.types import Branch, Turn


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
        adapter: Name of the adapter that sampled it (see `Rollout`).
    """

    prompt_ids: np.ndarray
    tokens: Sequence[int]
    policy_logps: Sequence[float]
    sampler_logps: Sequence[float]
    text: str = ""
    mask: np.ndarray | None = None
    messages: tuple[Any, ...] = ()
    number: int = 0
    adapter: str | None = None

    @property
    def stream(self) -> np.ndarray:
        """Token ids of its prompt and its own."""
        return np.concatenate([self.prompt_ids, np.asarray(self.tokens, np.int32)])


@dataclass(frozen=True, eq=False)
class Stream:
    """A branch with its turns.

    Attributes:
        branch: Its tokens.
        path: Its turns, the first one first.
        spans: Ranges of their tokens in the completion.
    """

    branch: Branch
    path: tuple[SampledTurn, ...]
    spans: tuple[Turn, ...]


def streams_of(turns: Sequence[SampledTurn]) -> list[Stream]:
    """Returns the token streams of an episode, the one with the most turns first.

    The order, and therefore the stream in which a shared turn counts, depends on the tokens alone, and not on the order
    in which parallel requests arrived. Streams in which no token counts are left out, except if there are no others.

    Args:
        turns: The turns of the episode, at least one.
    """
    parents = parents_of(turns)
    inner = set(parents) - {None}
    paths = [_path(turns, parents, leaf) for leaf in range(len(turns)) if leaf not in inner]
    paths.sort(
        key=lambda path: (
            -len(path),
            -sum(len(turn.tokens) for turn in path),
            path[-1].stream.tobytes(),
            path[0].adapter or "",
        )
    )
    counted: set[int] = set()
    streams = [_stream(path, counted) for path in paths]
    return [each for each in streams if each.branch.mask.any()] or streams[:1]


def parents_of(turns: Sequence[SampledTurn]) -> list[int | None]:
    """Returns the index of the turn that each one continues; None for the first turn of a stream."""
    streams = [turn.stream for turn in turns]
    by_length = sorted(range(len(turns)), key=lambda index: -len(streams[index]))
    parents: list[int | None] = []
    for index, turn in enumerate(turns):
        prompt = turn.prompt_ids
        shorter = (
            other
            for other in by_length
            if other != index and len(streams[other]) <= len(prompt) and turns[other].adapter == turn.adapter
        )
        parents.append(
            next((each for each in shorter if np.array_equal(streams[each], prompt[: len(streams[each])])), None)
        )
    return parents


def _path(turns: Sequence[SampledTurn], parents: Sequence[int | None], leaf: int) -> tuple[SampledTurn, ...]:
    path, index = [], leaf
    while index is not None:
        path.append(turns[index])
        index = parents[index]
    return tuple(reversed(path))


def _stream(path: tuple[SampledTurn, ...], counted: set[int]) -> Stream:
    """Returns the stream of a path, whose turns are added to those that were counted, by identity."""
    start = len(path[0].prompt_ids)
    ids = path[-1].stream[start:]
    mask = np.zeros(len(ids), bool)
    policy_logps, sampler_logps = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
    spans = []
    for turn in path:
        span = Turn(len(turn.prompt_ids) - start, len(turn.prompt_ids) - start + len(turn.tokens), turn.text)
        own = slice(span.start, span.end)
        mask[own] = (True if turn.mask is None else turn.mask) if id(turn) not in counted else False
        policy_logps[own], sampler_logps[own] = turn.policy_logps, turn.sampler_logps
        spans.append(span)
        counted.add(id(turn))
    zero = np.float32(0.0)
    logps = np.where(mask, policy_logps, zero), np.where(mask, sampler_logps, zero)
    return Stream(Branch(path[0].prompt_ids, ids, *logps, mask, adapter=path[0].adapter), path, tuple(spans))
