"""Automata over the tokens of a vocabulary, from automata over bytes. Imports no jax.

Tokens that lead from every state to the same state are one class, so that a table [states, classes] is enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import dijkstra

from groupax.constraints.byte_automaton import ByteAutomaton

MAX_ENTRIES = 1 << 25  # of a table
END_CLASS, UNUSED_CLASS = 0, 1  # classes of end-of-sequence tokens, and of tokens that never occur
_STATES_AT_ONCE = 1 << 22  # pairs of a state and a trie node


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """The completions that a constraint allows; state 0 is the first one.

    Attributes:
        token_class: Class of each token, [V].
        next_state: State after a token of a class, [S, C]; -1 where it must not follow.
        distance: Number of tokens after which a completion can end at the earliest, its end-of-sequence token
            included, [S]; 0 after that token.
    """

    token_class: np.ndarray
    next_state: np.ndarray
    distance: np.ndarray

    @property
    def min_tokens(self) -> int:
        """Length of the shortest completion."""
        return int(self.distance[0])


@dataclass(frozen=True, eq=False)
class _Level:
    """The nodes of a trie that have one depth: the node before each one, and the byte that leads to it."""

    parents: np.ndarray
    bytes: np.ndarray


class TokenTrie:
    """The tokens of a vocabulary by their first bytes.

    Args:
        tokens: Bytes of each token; empty for tokens that never occur.

    Attributes:
        tokens: The tokens' bytes.
        levels: The nodes by their depth.
        ends: Depth and node of each token, [V, 2]; -1 for tokens that never occur.
    """

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.levels: list[_Level] = []
        self.ends = np.full((len(tokens), 2), -1, np.int64)
        lengths = np.array([len(token) for token in tokens])
        node = np.zeros(len(tokens), np.int64)
        for depth in range(lengths.max(initial=0)):
            longer = np.flatnonzero(lengths > depth)
            byte = np.array([tokens[index][depth] for index in longer], np.int64)
            keys, node[longer] = np.unique(node[longer] * 256 + byte, return_inverse=True)
            self.levels.append(_Level(keys >> 8, keys & 255))
            ending = longer[lengths[longer] == depth + 1]
            self.ends[ending, 0], self.ends[ending, 1] = depth, node[ending]

    def next_states(self, automaton: ByteAutomaton, states: np.ndarray) -> np.ndarray:
        """Returns the states after each token, [states, V]; -1 where it must not follow."""
        table = np.vstack([automaton.next_state, np.full((1, 256), -1, np.int32)])  # -1 leads to -1
        after = np.full((len(states), len(self.tokens)), -1, np.int32)
        before = states[:, None]
        for depth, level in enumerate(self.levels):
            before = table[before[:, level.parents], level.bytes[None, :]]
            if (before < 0).all():
                break
            ending = np.flatnonzero(self.ends[:, 0] == depth)
            after[:, ending] = before[:, self.ends[ending, 1]]
        return after


def token_automaton(automaton: ByteAutomaton, trie: TokenTrie, eos_ids: tuple[int, ...]) -> TokenAutomaton:
    """Returns the automaton of the tokens that spell a text which another one accepts, and then end it.

    Args:
        automaton: Automaton over bytes.
        trie: The tokens.
        eos_ids: Tokens that end a completion.

    Raises:
        ValueError: No tokens spell such a text, or the table is too large.
    """
    if not eos_ids:
        raise ValueError("regex and json_schema need an end-of-sequence token; the model has none")
    S, V = len(automaton.next_state), len(trie.tokens)
    token_class = _classes(automaton, trie, S, V)
    token_class[np.array(eos_ids)] = END_CLASS
    C = int(token_class.max()) + 1
    if (S + 1) * C > MAX_ENTRIES:
        raise ValueError(
            f"the constraint needs a table of {S + 1:,} states and {C:,} classes of tokens, more than "
            f"{MAX_ENTRIES:,} entries; simplify it, for example its bounds of lengths"
        )
    classes, first = np.unique(token_class, return_index=True)
    representatives = TokenTrie([trie.tokens[index] for index in first])
    next_state = np.full((S + 1, C), -1, np.int32)  # the last state is that after the end
    for chunk in _chunks(S, representatives):
        next_state[chunk[:, None], classes[None, :]] = representatives.next_states(automaton, chunk)
    next_state[:, [END_CLASS, UNUSED_CLASS]] = -1
    next_state[:S, END_CLASS][automaton.accepting] = S
    next_state[S, END_CLASS] = S
    return _trimmed(token_class, next_state)


def _classes(automaton: ByteAutomaton, trie: TokenTrie, S: int, V: int) -> np.ndarray:
    """Returns the class of each token from 2 on, by a hash of the states that it leads to."""
    factors = np.random.default_rng(0).integers(0, 1 << 63, S, np.uint64)
    hashes, occurs = np.zeros(V, np.uint64), np.zeros(V, bool)
    for chunk in _chunks(S, trie):
        after = trie.next_states(automaton, chunk)
        for state, row in zip(chunk, after, strict=True):
            reached = np.flatnonzero(row >= 0)
            hashes[reached] += factors[state] * (row[reached].astype(np.uint64) + np.uint64(1))
            occurs[reached] = True
    token_class = np.full(V, UNUSED_CLASS, np.int32)
    token_class[occurs] = np.unique(hashes[occurs], return_inverse=True)[1].reshape(-1) + UNUSED_CLASS + 1
    return token_class


def _chunks(S: int, trie: TokenTrie) -> Iterator[np.ndarray]:
    """Yields states in ranges for which the arrays of a trie's largest level are not too large."""
    widest = max([len(trie.tokens), *(len(level.bytes) for level in trie.levels)])
    size = max(1, _STATES_AT_ONCE // widest)
    for start, end in pairwise([*range(0, S, size), S]):
        yield np.arange(start, end)


def _trimmed(token_class: np.ndarray, next_state: np.ndarray) -> TokenAutomaton:
    """Rules out what no completion can end after, and leaves out states that cannot be reached."""
    number = len(next_state)
    state, column = np.nonzero(next_state >= 0)
    after = next_state[state, column]
    pairs = np.unique(after.astype(np.int64) * number + state)
    backward: Any = coo_array((np.ones(len(pairs)), (pairs // number, pairs % number)), (number, number)).tocsr()
    distance = dijkstra(backward, indices=number - 1, unweighted=True)
    if not np.isfinite(distance[0]):
        raise ValueError("the tokenizer has no tokens that spell a text which the constraint allows")
    is_reached = np.isfinite(dijkstra(backward.T.tocsr(), indices=0, unweighted=True))
    kept = np.flatnonzero(is_reached & np.isfinite(distance))
    rank = np.full(number + 1, -1, np.int32)  # the last entry is that of -1
    rank[kept] = np.arange(len(kept))
    return TokenAutomaton(token_class, rank[next_state[kept]], distance[kept].astype(np.int32))
