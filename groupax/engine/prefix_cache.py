"""Keys and values of finished sequences, on the host, for prompts that continue them. Imports no jax.

A conversation's next turn begins with everything said so far, whose keys and values are looked up instead of computed
again: in the place that belongs to the conversation, if it has one, otherwise among the most recently used ones. They
belong to one set of weights; code that changes the weights must clear the cache.
"""

from collections.abc import Sequence as Many
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


def prefix_of(stored: Many[Any], prompt: np.ndarray, tokens: list[int], adapter: int = -1) -> Prefix:
    """Returns the prefix of a prompt and its completion.

    Args:
        stored: Each layer of what `conversations.read_slots` returns for its slot, on the host.
    """
    in_prompt, in_row = slice(stored[0].prompt_k.shape[-1] - (len(prompt) - 1), None), slice(len(tokens))
    k = [np.concatenate([x.prompt_k[..., in_prompt], x.k[..., in_row]], axis=2) for x in stored]
    v = [np.concatenate([x.prompt_v[:, in_prompt], x.v[:, in_row]], axis=1) for x in stored]
    return Prefix(np.array([*prompt, *tokens[:-1]], np.int64), k, v, adapter)


class PrefixCache:
    """The most recently used prefixes that fit into `max_bytes` of host memory.

    Places of conversations, among which the same memory is divided, belong to the same weights.

    Attributes:
        num_reused_tokens: Number of prompt tokens that were looked up instead of computed.
        generation: Number of times that the cache was cleared, which identifies the weights.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_reused_tokens = self.generation = 0
        self._prefixes: list[Prefix] = []  # the last used one is the last

    def __len__(self) -> int:
        return len(self._prefixes)

    def clear(self) -> None:
        """Drops all prefixes, and makes all places forget theirs, because the weights changed."""
        self._prefixes.clear()
        self.generation += 1

    def find(self, tokens: np.ndarray, adapter: int = -1) -> tuple[int, Prefix | None]:
        """Returns the length of the longest beginning that `tokens` share with a prefix, and that prefix."""
        lengths = [_common_length(tokens, each.tokens) if each.adapter == adapter else 0 for each in self._prefixes]
        longest = max(lengths, default=0)
        if longest == 0:
            return 0, None
        self._prefixes.append(self._prefixes.pop(lengths.index(longest)))
        return longest, self._prefixes[-1]

    def add(self, prefix: Prefix) -> None:
        """Stores a prefix; drops those that it continues and, where memory is short, the least recently used ones."""
        num_bytes = prefix.num_bytes
        if num_bytes > self.max_bytes:
            return
        kept = [prefix]
        for other in reversed(self._prefixes):
            is_continued = _common_length(other.tokens, prefix.tokens) == len(other.tokens)
            if is_continued and other.adapter == prefix.adapter:
                continue
            num_bytes += other.num_bytes
            if num_bytes > self.max_bytes:
                break
            kept.append(other)
        self._prefixes = kept[::-1]


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if differ.size else size
