"""The subset construction: deterministic automata from nondeterministic ones. Imports no jax."""

import numpy as np

from groupax.constraints.regex_nfa import Nfa


def determinized(nfa: Nfa, max_states: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the deterministic automaton of the same texts; state 0 is the first one.

    Args:
        nfa: The automaton.
        max_states: Maximum number of states.

    Returns:
        The state after each byte, [S, 256], -1 where it must not follow, and whether a text may end in a state, [S].

    Raises:
        ValueError: It needs more states.
    """
    closures: dict[int, frozenset[int]] = {}
    starts = sorted({0, *(b for edges in nfa.bytes for low, high, _ in edges for b in (low, high + 1))} - {256})
    class_of = np.searchsorted(starts, np.arange(256), side="right") - 1
    edges = [[(int(class_of[low]), int(class_of[high]) + 1, after) for low, high, after in each] for each in nfa.bytes]
    first = _closure(nfa, nfa.start, closures)
    numbers, order, rows = {first: 0}, [first], []
    for state in order:  # which grows meanwhile
        targets: list[set[int]] = [set() for _ in starts]
        for node in state:
            for low, high, after in edges[node]:
                for byte_class in range(low, high):
                    targets[byte_class].add(after)
        row, known = [], {}
        for nodes in targets:
            key = frozenset(nodes)
            if key not in known:
                known[key] = frozenset().union(*(_closure(nfa, node, closures) for node in key))
            after = known[key]
            if after and after not in numbers:
                if len(order) >= max_states:
                    raise ValueError(f"it needs more than {max_states:,} states; lower the bounds of its repetitions")
                numbers[after] = len(order)
                order.append(after)
            row.append(numbers.get(after, -1))
        rows.append(row)
    accepting = np.array([nfa.end in state for state in order])
    return np.array(rows, np.int32).reshape(len(order), len(starts))[:, class_of], accepting


def _closure(nfa: Nfa, node: int, closures: dict[int, frozenset[int]]) -> frozenset[int]:
    """Returns the nodes with edges for bytes, and the end, that a node reaches without a byte."""
    found = closures.get(node)
    if found is None:
        reached, left = {node}, [node]
        while left:
            new = [after for after in nfa.free[left.pop()] if after not in reached]
            reached.update(new)
            left += new
        found = closures[node] = frozenset(each for each in reached if nfa.bytes[each] or each == nfa.end)
    return found
