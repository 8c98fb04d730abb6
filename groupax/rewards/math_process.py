"""A process that compares mathematical answers, as algebra on hostile input may not end. Imports no jax.

    caller ──► {"answer", "gold"} as a line of JSON ──► expressions.equal ──► true, false or null ──► caller
                                          └─ more than SECONDS of CPU time or MEMORY_BYTES: the process dies ──► False

The process is a fresh interpreter rather than a fork or a spawned copy of the caller, so that it neither inherits jax's
threads nor runs the user's script again. Its limits are the kernel's, which also end what does not return to Python.
"""

import atexit
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading

SECONDS = 5.0  # of CPU time for one pair, so that a busy machine changes no reward
WAIT_S = 120.0  # for an answer, or for the start, by the clock
MEMORY_BYTES = 2**32


class Comparer:
    """Compares answers in a process of its own, which is started when first needed and again after it has died.

    Any thread may call it; they take turns.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, answer: str, gold: str) -> bool | None:
        """As `expressions.equal`; False if that takes too long or too much memory.

        Raises:
            RuntimeError: the process does not start.
        """
        with self._turn:
            if self._process is None or self._process.poll() is not None:
                self._start()
            process = self._process
            assert process is not None, "started"
            assert process.stdin is not None, "a pipe"
            process.stdin.write(json.dumps([answer, gold]).encode() + b"\n")
            process.stdin.flush()
            line = _line_of(process)
            if line is None:
                self._end()
                return False
            return json.loads(line)

    def close(self) -> None:
        """End the process."""
        with self._turn:
            self._end()

    def _start(self) -> None:
        self._end()
        command = [sys.executable, "-m", "groupax.rewards.math_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if _line_of(self._process) is None:
            self._end()
            raise RuntimeError(
                f"the process that compares mathematical answers did not start (`{' '.join(command)}`); what it wrote "
                "to stderr says why"
            )

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _line_of(process: subprocess.Popen[bytes]) -> bytes | None:
    """The next line that a process writes; None if it ends or takes too long."""
    assert process.stdout is not None, "a pipe"
    readable, _, _ = select.select([process.stdout], [], [], WAIT_S)
    return (process.stdout.readline() if readable else b"") or None


COMPARER = Comparer()
atexit.register(COMPARER.close)


def _serve() -> None:
    """Answer comparisons, a line of JSON each, until the other side closes."""
    from groupax.rewards.expressions import equal

    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time limits that are the kernel's here
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    equal("1", "1")  # imports what it needs
    os.write(answers, b"null\n")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        verdict = equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        os.write(answers, json.dumps(verdict).encode() + b"\n")


if __name__ == "__main__":
    _serve()
