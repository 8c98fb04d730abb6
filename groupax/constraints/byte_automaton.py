"""Deterministic automata over bytes, from regular expressions. Imports no jax."""

import io
import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAX_REGEX_CHARACTERS = 1 << 20
MAX_BYTE_STATES = 20_000
MAX_SECONDS = 5  # of CPU time
MAX_BYTES = 2 << 30  # of address space
_ROOT = Path(__file__).parents[2]
_WORKER = "groupax.constraints.regex_worker"
_running = threading.BoundedSemaphore(2)  # workers at a time, whatever clients request


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """The texts in UTF-8 that a regular expression matches as a whole; state 0 is the first one.

    Attributes:
        next_state: State after each byte, [S, 256]; -1 where the byte must not follow.
        accepting: [S] whether a text may end in a state.
    """

    next_state: np.ndarray
    accepting: np.ndarray


def compile_regex(regex: str) -> ByteAutomaton:
    """Returns the smallest automaton of a regular expression in Python's syntax, with the classes of `re.ASCII`.

    Raises:
        ValueError: The expression is invalid, matches nothing, or takes more time, memory or states than is allowed.
    """
    if len(regex) > MAX_REGEX_CHARACTERS:
        raise ValueError(
            f"the regular expression has {len(regex):,} characters, at most {MAX_REGEX_CHARACTERS:,} are allowed; "
            "simplify it, or the schema that it was made from"
        )
    limits = {"max_states": MAX_BYTE_STATES, "max_seconds": MAX_SECONDS, "max_bytes": MAX_BYTES}
    code = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {_WORKER} import main; main()"
    with _running:
        done = subprocess.run(
            [sys.executable, "-I", "-c", code],
            input=json.dumps({"regex": regex, **limits}).encode(),
            capture_output=True,
            check=False,
        )
    return _minimized(*_read(done, regex))


def _read(done: "subprocess.CompletedProcess[bytes]", regex: str) -> tuple[np.ndarray, np.ndarray]:
    shown = regex if len(regex) <= 80 else f"{regex[:77]}..."
    if done.stdout.startswith(b"{"):
        raise ValueError(f"the regular expression {shown!r} cannot be compiled: {json.loads(done.stdout)['error']}")
    if done.returncode != 0:
        is_limit = done.returncode < 0 or b"MemoryError" in done.stderr
        assert is_limit, done.stderr.decode(errors="replace")
        raise ValueError(
            f"the regular expression {shown!r} takes more than {MAX_SECONDS} s or {MAX_BYTES >> 30} GiB to compile; "
            "simplify it, for example its repetitions within repetitions"
        )
    with np.load(io.BytesIO(done.stdout)) as arrays:
        return arrays["next_state"], arrays["accepting"]


def _minimized(next_state: np.ndarray, accepting: np.ndarray) -> ByteAutomaton:
    """Merges states that the same texts lead from to an end (Moore's algorithm)."""
    columns, byte_class = np.unique(next_state, axis=1, return_inverse=True)
    byte_class = byte_class.reshape(-1)
    block, num_blocks = accepting.astype(np.int64), 0
    while block.max() + 1 > num_blocks:
        num_blocks = int(block.max()) + 1
        after = np.where(columns < 0, -1, block[columns])
        _, block = np.unique(np.column_stack([block, after]), axis=0, return_inverse=True)
        block = block.reshape(-1)
    order = np.argsort([block[0] != each for each in range(num_blocks)], kind="stable")  # the first state's block first
    rank = np.empty(num_blocks, np.int32)
    rank[order] = np.arange(num_blocks)
    _, representative = np.unique(block, return_index=True)
    kept = representative[order]
    after = columns[kept]
    merged = np.where(after < 0, -1, rank[block[after]]).astype(np.int32)
    return ByteAutomaton(merged[:, byte_class], accepting[kept])
