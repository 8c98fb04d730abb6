"""Automata over bytes in tests: which texts they accept, and random ones that they accept."""

import numpy as np

from groupax.constraints.byte_automaton import ByteAutomaton
from groupax.constraints.determinize import determinized
from groupax.constraints.json_schema import regex_of_schema
from groupax.constraints.regex_nfa import Nfa


def automaton_of(regex):
    return ByteAutomaton(*determinized(Nfa(regex), 20_000))


def accepts(automaton, text):
    state = 0
    for byte in text.encode():
        state = automaton.next_state[state, byte]
        if state < 0:
            return False
    return bool(automaton.accepting[state])


def distances(automaton):
    """The number of bytes from each state to the nearest end."""
    found = np.where(automaton.accepting, 0, 1 << 20)
    while True:
        after = np.where(automaton.next_state < 0, 1 << 20, np.append(found, 1 << 20)[automaton.next_state])
        nearer = np.minimum(found, after.min(axis=1) + 1)
        if (nearer == found).all():
            return found
        found = nearer


def random_text(automaton, rng, length=40):
    """A text that the automaton accepts, of about this length at most."""
    distance, state, written = distances(automaton), 0, b""
    while True:
        row = automaton.next_state[state]
        following = np.flatnonzero(row >= 0)
        following = following[distance[row[following]] < 1 << 20]
        if automaton.accepting[state] and (not len(following) or len(written) > length or rng.random() < 0.3):
            return written.decode()
        if len(written) > length:
            following = following[distance[row[following]] < distance[state]]
        elif rng.random() < 0.7:
            plain = [byte for byte in following if chr(byte) in '0123456789.,:"{}[]-tfnu']
            following = plain or following
        byte = int(rng.choice(following))
        written, state = written + bytes([byte]), row[byte]


def schema_automaton(schema):
    import json

    return automaton_of(regex_of_schema(json.dumps(schema)))
