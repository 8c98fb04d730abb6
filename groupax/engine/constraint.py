"""Constrained decoding on the devices: the tokens that each slot may sample, by the tables of all constraints."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from groupax.constraints.token_automaton import END_CLASS, TokenAutomaton
from groupax.engine.cache import ROWS
from groupax.engine.sequence import Sequence
from groupax.parallel.pytree import pytree


@dataclass(frozen=True)
class TableSize:
    """Numbers of constraints, states and classes of tokens that tables have room for; programs depend on them."""

    constraints: int = 2
    states: int = 256
    classes: int = 64

    def including(self, automata: list[TokenAutomaton]) -> "TableSize":
        """Returns the smallest size, in steps of 4, that is at least this one and has room for these automata."""
        needed = (
            1 + len(automata),
            1 + sum(len(each.distance) for each in automata),
            max((each.next_state.shape[1] for each in automata), default=1),
        )
        sizes = [self.constraints, self.states, self.classes]
        for index, number in enumerate(needed):
            while sizes[index] < number:
                sizes[index] *= 4
        return TableSize(*sizes)


@pytree
class Constraints:
    """The tables of several constraints, the first of which allows everything, and where each slot is in its own.

    Attributes:
        slot_state: State of each slot, among those of all constraints.
        slot_constraint: Index of each slot's constraint.
        token_class: Class of each token, for each of Z constraints.
        next_state: State after a token of a class, -1 where it must not follow, for N states in all.
        distance: Number of tokens after which a completion can end at the earliest, from each state.
    """

    slot_state: Int[Array, "B"]
    slot_constraint: Int[Array, "B"]
    token_class: Int[Array, "Z V"]
    next_state: Int[Array, "N C"]
    distance: Int[Array, "N"]


def abstract_constraints(rows: Any, tables: Iterable[Any]) -> Constraints:
    """Returns constraints of shapes instead of arrays: that of an entry per slot, and those of the tables."""
    constraints = object.__new__(Constraints)
    for each, value in zip(fields(Constraints), (rows, rows, *tables), strict=True):
        object.__setattr__(constraints, each.name, value)
    return constraints


def constraint_pspecs(of: Constraints | None) -> Any:
    """Returns the pspecs of constraints: slots over the data axes, tables on every device."""
    if of is None:
        return None
    return abstract_constraints(ROWS, [PartitionSpec()] * 3)


class ConstraintTables:
    """The tables of the constraints of a batch, which stay on the devices while these are the same.

    Args:
        vocab_size: Number of tokens.
        on_rows: Copies an array with an entry per slot to the devices.
        on_all: Copies an array to every device.
    """

    def __init__(
        self, vocab_size: int, on_rows: Callable[[np.ndarray], Any], on_all: Callable[[np.ndarray], Any]
    ) -> None:
        self.vocab_size, self.on_rows, self.on_all = vocab_size, on_rows, on_all
        self._size: TableSize | None = None
        self._places: dict[TokenAutomaton, tuple[int, int]] = {}  # index and first state of each constraint
        self._tables: tuple[Any, ...] = ()

    def of(self, slots: Iterable[Sequence | None], size: TableSize) -> Constraints:
        """Returns the constraints of the sequences in all slots.

        Args:
            slots: The sequence in each slot; None for an idle one.
            size: Size of the tables, enough for these sequences.
        """
        slots = list(slots)
        automata = automata_of(each for each in slots if each is not None)
        if size != self._size or not set(automata) <= self._places.keys():
            self._replace(automata, size)
        state, constraint = np.zeros((2, len(slots)), np.int32)
        for slot, sequence in enumerate(slots):
            if sequence is not None and sequence.automaton is not None:
                constraint[slot], first = self._places[sequence.automaton]
                state[slot] = first + sequence.state
        return Constraints(self.on_rows(state), self.on_rows(constraint), *self._tables)

    def update(self, slots: Iterable[Sequence | None], state: np.ndarray) -> None:
        """Sets the states of the sequences in all slots after a chunk.

        Args:
            slots: The sequence in each slot; None for an idle one.
            state: The chunk's states of the slots.
        """
        for slot, sequence in enumerate(slots):
            if sequence is not None and sequence.automaton is not None:
                sequence.state = int(state[slot]) - self._places[sequence.automaton][1]

    def _replace(self, automata: list[TokenAutomaton], size: TableSize) -> None:
        token_class = np.full((size.constraints, self.vocab_size), END_CLASS + 1, np.int32)
        next_state = np.full((size.states, size.classes), -1, np.int32)
        distance = np.zeros(size.states, np.int32)
        next_state[0] = 0  # of slots without a constraint
        self._places, first = {}, 1
        for index, each in enumerate(automata, start=1):
            S, C = each.next_state.shape
            self._places[each] = index, first
            token_class[index] = each.token_class
            next_state[first : first + S, :C] = np.where(each.next_state < 0, -1, each.next_state + first)
            distance[first : first + S] = each.distance
            first += S
        self._size = size
        self._tables = tuple(self.on_all(each) for each in (token_class, next_state, distance))


def automata_of(sequences: Iterable[Sequence]) -> list[TokenAutomaton]:
    """Returns the automata of sequences, each once."""
    return list(dict.fromkeys(each.automaton for each in sequences if each.automaton is not None))


def slot_classes(of: Constraints) -> Int[Array, "B V"]:
    """Returns the class of each token under each slot's constraint."""
    return of.token_class[of.slot_constraint]


def allowed_tokens(
    of: Constraints, classes: Int[Array, "B V"], state: Int[Array, "B"], remaining: Int[Array, "B"]
) -> Bool[Array, "B V"]:
    """Returns the tokens that each slot may sample, at least one.

    A token is ruled out as well if the completion could no longer end within the slot's limit.

    Args:
        of: The tables.
        classes: The result of `slot_classes`.
        state: State of each slot now.
        remaining: Number of tokens that each slot may still sample, that one included; 0 for an idle slot.
    """
    after = of.next_state[state]
    # the limit of an idle slot does not count: without any token it would have no distribution
    in_time = (of.distance[after] < remaining[:, None]) | (remaining <= 0)[:, None]
    by_class = (after >= 0) & in_time
    return jnp.take_along_axis(by_class, classes, axis=-1, mode="promise_in_bounds")


def state_after(
    of: Constraints,
    classes: Int[Array, "B V"],
    state: Int[Array, "B"],
    token: Int[Array, "B"],
    active: Bool[Array, "B"],
) -> Int[Array, "B"]:
    """Returns the state of each slot after a token of those that are active."""
    of_token = jnp.take_along_axis(classes, token[:, None], axis=-1)[:, 0]
    return jnp.where(active, of.next_state[state, of_token], state)
