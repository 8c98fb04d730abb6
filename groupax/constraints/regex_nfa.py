"""Nondeterministic automata over bytes, from regular expressions in Python's syntax. Imports neither jax nor numpy."""

import re
from re import _constants, _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from groupax.constraints.characters import Ranges, complement, encodings, union

MAX_NODES = 1_000_000
_DIGITS = ((48, 57),)
_WORDS = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACES = ((9, 13), (32, 32))
_CATEGORIES: dict[str, Ranges] = {
    "CATEGORY_DIGIT": _DIGITS,
    "CATEGORY_NOT_DIGIT": complement(_DIGITS),
    "CATEGORY_WORD": _WORDS,
    "CATEGORY_NOT_WORD": complement(_WORDS),
    "CATEGORY_SPACE": _SPACES,
    "CATEGORY_NOT_SPACE": complement(_SPACES),
}
_FLAGS = re.IGNORECASE | re.DOTALL | re.ASCII | re.UNICODE | re.VERBOSE
_STARTS, _ENDS = ("AT_BEGINNING", "AT_BEGINNING_STRING"), ("AT_END", "AT_END_STRING")


class Nfa:
    """Nodes with edges for bytes, and edges without any.

    Attributes:
        bytes: For each node the edges for bytes: first byte, last byte, node after it.
        free: For each node those that are reached without a byte.
        start, end: The first and the last node of the whole expression.
    """

    def __init__(self, regex: str) -> None:
        self.bytes: list[list[tuple[int, int, int]]] = []
        self.free: list[list[int]] = []
        self.end = self._node()
        self._flags = 0
        try:
            parsed = _parser.parse(regex)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"it is not valid: {error}") from error
        self._flags = parsed.state.flags
        if self._flags & ~_FLAGS:
            raise ValueError("it has the flag m or L; only i, s, a, u and x are supported")
        self.start = self._sequence(_without_anchors(list(parsed)), self.end)

    def _node(self) -> int:
        if len(self.bytes) >= MAX_NODES:
            raise ValueError(f"it needs more than {MAX_NODES:,} nodes; lower the bounds of its repetitions")
        self.bytes.append([])
        self.free.append([])
        return len(self.bytes) - 1

    def _sequence(self, parts: Any, end: int) -> int:
        """Adds parts that follow each other and returns their first node."""
        for op, argument in reversed(list(parts)):
            end = self._part(str(op), argument, end)
        return end

    def _part(self, op: str, argument: Any, end: int) -> int:
        """Adds one part before a node and returns its first node."""
        match op:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._character(self._ranges(op, argument), end)
            case "SUBPATTERN":
                _, added, removed, inner = argument
                if added or removed:
                    raise ValueError("it has flags in a group; set them at its start, as (?i)")
                return self._sequence(inner, end)
            case "BRANCH":
                start = self._node()
                self.free[start] += [self._sequence(_without_anchors(list(branch)), end) for branch in argument[1]]
                return start
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, inner = argument
                return self._repeat(low, high, inner, end)
        names = {"AT": "an anchor or a word boundary in its middle", "GROUPREF": "a backreference"}
        raise ValueError(f"it has {names.get(op, 'look-around or an atomic group')}, which is not supported")

    def _repeat(self, low: int, high: Any, inner: Any, end: int) -> int:
        if high is _constants.MAXREPEAT:
            start = self._node()
            self.free[start] += [self._sequence(inner, start), end]
        else:
            start = end
            for _ in range(high - low):
                first = self._node()
                self.free[first] += [self._sequence(inner, start), end]
                start = first
        for _ in range(low):
            start = self._sequence(inner, start)
        return start

    def _character(self, ranges: Ranges, end: int) -> int:
        start = self._node()
        inner: dict[tuple[Any, ...], int] = {(): end}  # by the ranges of the bytes that are left
        for encoding in encodings(ranges):
            for index in range(len(encoding) - 1, 0, -1):
                rest = encoding[index:]
                if rest not in inner:
                    node = inner[rest] = self._node()
                    self.bytes[node].append((*rest[0], inner[rest[1:]]))
            self.bytes[start].append((*encoding[0], inner[encoding[1:]]))
        return start

    def _ranges(self, op: str, argument: Any) -> Ranges:
        """Returns the characters that a part matches one of."""
        if op == "ANY":
            return complement(()) if self._flags & re.DOTALL else complement(((10, 10),))
        items = argument if op == "IN" else [(op, argument)]
        is_negated, found = op == "NOT_LITERAL", []
        for kind, value in items:
            match str(kind):
                case "NEGATE":
                    is_negated = True
                case "LITERAL" | "NOT_LITERAL":
                    found.append((value, value))
                case "RANGE":
                    found.append(value)
                case _:
                    found += _CATEGORIES[str(value)]
        if self._flags & re.IGNORECASE:
            found += [each for pair in found for each in _other_case(*pair)]
        ranges = union(found)
        return complement(ranges) if is_negated else ranges


def _other_case(low: int, high: int) -> list[tuple[int, int]]:
    """Returns the ranges of the letters of ASCII in the other case."""
    found = []
    for first, last, shift in ((65, 90, 32), (97, 122, -32)):
        if max(low, first) <= min(high, last):
            found.append((max(low, first) + shift, min(high, last) + shift))
    return found


def _without_anchors(parts: list[Any]) -> list[Any]:
    """Leaves out the anchors at the start and the end of parts, since a match is one of the whole text."""
    while parts and str(parts[0][0]) == "AT" and str(parts[0][1]) in _STARTS:
        parts = parts[1:]
    while parts and str(parts[-1][0]) == "AT" and str(parts[-1][1]) in _ENDS:
        parts = parts[:-1]
    return parts
