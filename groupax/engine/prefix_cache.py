"""Keys and values of finished sequences, on the host, for prompts that go on from them. Imports no jax.

A conversation's next turn begins with all that was said so far; what was computed for that is looked up instead of
computed again. The store belongs to one set of weights, which it does not hold; who changes them clears it.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Prefix:
    """What is known of `tokens`: per layer keys [K, H, n] and values [K, n, H]."""

    tokens: np.ndarray
    k: list[np.ndarray]
    v: list[np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return sum(array.nbytes for array in (*self.k, *self.v))


class PrefixCache:
    """The most recently used prefixes that fit into `max_bytes` of host memory.

    Attributes:
        num_bytes: of what is stored.
        num_reused_tokens: of prompts that were not computed because of it.
        generation: of the weights, one more whenever it was cleared.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.num_reused_tokens = self.generation = 0
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    def clear(self) -> None:
        """Forget everything: it was computed by other weights."""
        self._prefixes.clear()
        self.num_bytes = 0
        self.generation += 1

    def find(self, tokens: np.ndarray) -> tuple[int, Prefix | None]:
        """The prefix that has the longest beginning of `tokens`, and its length."""
        longest, best = 0, None
        for key, prefix in self._prefixes.items():
            length = _common_length(tokens, prefix.tokens)
            if length > longest:
                longest, best = length, key
        if best is None:
            return 0, None
        self._prefixes.move_to_end(best)
        return longest, self._prefixes[best]

    def gather(
        self, prompts: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]] | None:
        """What is known of left-padded prompts, [P, S], that begin at `starts`; None if nothing.

        Returns:
            Each one's number of known tokens, and per layer keys [P, K, H, S] and values [P, K, S, H].
        """
        found = [self.find(row[start:]) for row, start in zip(prompts, starts, strict=True)]
        some = next((prefix for _, prefix in found if prefix), None)
        if some is None:
            return None
        (P, S), (K, H, _), dtype = prompts.shape, some.k[0].shape, some.k[0].dtype
        k = [np.zeros((P, K, H, S), dtype) for _ in some.k]
        v = [np.zeros((P, K, S, H), dtype) for _ in some.v]
        for index, (length, prefix) in enumerate(found):
            if prefix is None:
                continue
            columns = slice(starts[index], starts[index] + length)
            for layer, (keys, values) in enumerate(zip(prefix.k, prefix.v, strict=True)):
                k[layer][index][..., columns] = keys[..., :length]
                v[layer][index][:, columns] = values[:, :length]
        lengths = np.array([length for length, _ in found], np.int32)
        self.num_reused_tokens += int(lengths.sum())
        return lengths, k, v

    def add(self, prefix: Prefix) -> None:
        """Keep a prefix, in place of those that it continues and of the longest unused ones if need be."""
        if prefix.num_bytes > self.max_bytes:
            return
        for key, other in list(self._prefixes.items()):
            if _common_length(other.tokens, prefix.tokens) == len(other.tokens):
                self._drop(key)
        self._prefixes[prefix.tokens.tobytes()] = prefix
        self.num_bytes += prefix.num_bytes
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._prefixes)))

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= self._prefixes.pop(key).num_bytes


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if differ.size else size
