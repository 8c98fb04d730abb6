"""Compiles a regular expression into a byte automaton, in a process of its own with limits of time and memory.

The automaton of some expressions takes exponential time and memory. `byte_automaton` runs this file as a program: JSON
in, the arrays of an npz file out.
"""

import io
import json
import resource
import sys

import numpy as np

from groupax.constraints.determinize import determinized
from groupax.constraints.regex_nfa import Nfa


def main() -> None:
    """Reads a request from the standard input and writes an npz file, or a JSON object with an error."""
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (request["max_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (request["max_seconds"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        next_state, accepting = determinized(Nfa(request["regex"]), request["max_states"])
    except ValueError as error:
        sys.stdout.buffer.write(json.dumps({"error": str(error)}).encode())
        return
    file = io.BytesIO()
    np.savez(file, next_state=next_state, accepting=accepting)
    sys.stdout.buffer.write(file.getvalue())


if __name__ == "__main__":
    main()
