"""Keys and values of conversations, on the host, for the turns that continue them. Imports no jax.

A conversation's next turn begins with everything said so far, whose keys and values are looked up in its place instead
of computed again. They belong to one set of weights; code that changes the weights must clear the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Prefix:
    """The keys, [K, H, n], and values, [K, n, H], of n tokens in each layer, computed with an adapter, -1 for none.

    Tokens are what a prompt is looked up by: token ids, and numbers below 0 in place of those that stand for an image
    (see `images.lookup_tokens`).
    """

    tokens: np.ndarray
    k: list[np.ndarray]
    v: list[np.ndarray]
    adapter: int = -1

    @property
    def num_bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(array.nbytes for array in (*self.k, *self.v))

    def first(self, num_tokens: int) -> "Prefix":
        """Returns the prefix of the first tokens, in memory of its own."""
        if num_tokens >= len(self.tokens):
            return self
        k, v = [x[..., :num_tokens].copy() for x in self.k], [x[:, :num_tokens].copy() for x in self.v]
        return Prefix(self.tokens[:num_tokens], k, v, self.adapter)


@dataclass(eq=False)
class Place:
    """A place for the keys and values of one conversation, which no other one uses.

    What is stored depends on the conversation alone, so that its results do not depend on what runs at the same time.
    """

    max_tokens: int  # maximum number of tokens, the first ones of the conversation; those after them are computed again
    prefix: Prefix | None = None  # the tokens with their keys and values; None for none
    generation: int = 0  # weights that they were computed with (see `PrefixCache.generation`)

    def put(self, prefix: Prefix, generation: int) -> None:
        """Stores the first tokens of a prefix in place of what is stored."""
        self.prefix, self.generation = prefix.first(self.max_tokens), generation

    def find(self, tokens: np.ndarray, generation: int, adapter: int = -1) -> tuple[int, Prefix | None]:
        """Returns the number of tokens that `tokens` begin with and that are stored here, with the prefix."""
        if self.prefix is None or (self.generation, self.prefix.adapter) != (generation, adapter):
            return 0, None
        length = _common_length(tokens, self.prefix.tokens)
        return length, self.prefix if length else None


def prefix_of(stored: Mapping[str, Any], prompt: np.ndarray, tokens: list[int], adapter: int = -1) -> Prefix:
    """Returns the prefix of a prompt and its completion.

    Args:
        stored: What `conversations.read_slots` returns for its slot, on the host.
    """
    in_prompt = slice(stored["prompt_k"][0].shape[-1] - (len(prompt) - 1), None)
    in_row = slice(len(tokens))
    pairs = zip(stored["prompt_k"], stored["k"], strict=True)
    k = [np.concatenate([before[..., in_prompt], row[..., in_row]], axis=2) for before, row in pairs]
    pairs = zip(stored["prompt_v"], stored["v"], strict=True)
    v = [np.concatenate([before[:, in_prompt], row[:, in_row]], axis=1) for before, row in pairs]
    return Prefix(np.array([*prompt, *tokens[:-1]], np.int64), k, v, adapter)


class PrefixCache:
    """The memory for the places of conversations, and what they have in common.

    Attributes:
        max_bytes: Host memory that is divided among the places.
        num_reused_tokens: Number of prompt tokens that were looked up instead of computed.
        generation: Number of times that the cache was cleared, which identifies the weights.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_reused_tokens = self.generation = 0

    def clear(self) -> None:
        """Makes all places forget what they have, because the weights changed."""
        self.generation += 1


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if differ.size else size
