"""Rewards for correct answers to mathematical problems, which another process compares. Imports no jax.

Algebra on hostile input may not terminate, so that expressions are compared in a process with limits:

    caller ──► [answer, gold] as a line of JSON ──► expressions.equal, or another function ──► its result ──► caller
                                     └─ more than SECONDS of CPU time or MEMORY_BYTES: the process dies ──► False

The process is a new interpreter, not a fork or a spawned copy of the caller, so that it neither inherits jax's threads
nor runs the user's script again. The kernel enforces its limits, also on code that does not return to Python.
"""

import atexit
import importlib
import importlib.util
import json
import logging
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from groupax.core.errors import require
from groupax.rewards.answers import final_expression, final_number
from groupax.rewards.text import boxes, completion_text

SECONDS = 5.0  # CPU time for one pair, so that rewards do not depend on the load of the machine
WAIT_S = 120.0  # wall time for an answer, or for the start
MEMORY_BYTES = 2**32


def gsm8k_accuracy(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns 1 if a completion's final number equals the gold one in value (`1,000` is `1000.0`), else 0.

    `numbers.final_number` defines the final number of a text. A heading (`#### Step 3`, `#### 3. Add up`) is not an
    answer after `####`. A sign counts only directly before the number or its currency.

    Args:
        completions: Completions of the policy.
        answer: Gold answers: GSM8K's solutions (`... #### 42`) or plain numbers.

    Returns:
        A reward per completion; None where the gold answer has no number.
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        expected = final_number(str(gold))
        found = final_number(completion_text(completion))
        rewards.append(None if expected is None else float(found is not None and found == expected))
    return rewards


def math_accuracy(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns 1 if a completion's answer equals the gold one as a mathematical expression, else 0.

    `answers.final_expression` defines the answer of a completion (the last `\boxed{}`, if there is one), and
    `expressions.equal` when two expressions are equal: math-verify compares their values, but a relation, a chain or a
    list does not pass for a number.

    Args:
        completions: Completions of the policy.
        answer: Gold answers: an expression (`\frac{3}{4}`, `0.75`, `x \ge 5`) or a solution with the answer in
            `\boxed{}` or `$...$`.

    Returns:
        A reward per completion; None where there is no gold answer or it cannot be parsed. A pair that takes more than
        5 s of CPU time or 4 GiB counts as wrong.

    Raises:
        ImportError: math-verify is not installed (`pip install groupax[math]`).
    """
    require("math", "math_accuracy", is_imported=False)
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        expected = gold_expression(gold)
        found = final_expression(completion_text(completion))
        right = None if not expected else COMPARER(found or "", expected)
        rewards.append(None if right is None else float(right))
    return rewards


def gold_expression(gold: Any) -> str:
    r"""Returns the expression of a gold answer: the content of `\boxed{}` or `$...$`, else all of it; "" for none."""
    if gold is None or gold != gold:  # tables use NaN for a missing value
        return ""
    if isinstance(gold, float) and math.isfinite(gold):
        return format(Decimal(repr(gold)), "f")
    gold = str(gold)
    marked = r"\boxed" in gold or "$" in gold.replace(r"\$", "")
    return (final_expression(gold) or "") if marked else gold


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` that is closed. Braces may be nested."""
    found = boxes(text)
    return found[-1].content if found else None


class Comparer:
    """A comparison of answers in a separate process, which is started when first needed and restarted after it died.

    It may be called from any thread.

    Args:
        comparison: The function that compares two texts, as "module:function"; JSON can hold what it returns.
    """

    def __init__(self, comparison: str = "groupax.rewards.expressions:equal") -> None:
        self._comparison = comparison
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def __call__(self, answer: str, gold: str) -> Any:
        """Returns the result of the comparison; False if that takes too long or too much memory.

        Raises:
            ImportError: math-verify is not installed.
            RuntimeError: The process does not start.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("answers are compared by math-verify: pip install 'groupax[math]'")
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            process = self._process
            assert process is not None, "started"
            assert process.stdin is not None, "a pipe"
            process.stdin.write(json.dumps([answer, gold]).encode() + b"\n")
            process.stdin.flush()
            line = _read_line(process)
            if line is None:
                self._stop()
                return False
            return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        command = [sys.executable, "-m", "groupax.rewards.maths", self._comparison]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if _read_line(self._process) is None:
            self._stop()
            raise RuntimeError(
                f"the process that compares mathematical answers did not start (`{' '.join(command)}`); see its "
                "output on stderr"
            )

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _read_line(process: subprocess.Popen[bytes]) -> bytes | None:
    """Returns the next line that a process writes; None if it exits or takes too long."""
    assert process.stdout is not None, "a pipe"
    readable, _, _ = select.select([process.stdout], [], [], WAIT_S)
    return (process.stdout.readline() if readable else b"") or None


COMPARER = Comparer()


def _serve(comparison: str) -> None:
    """Answers comparisons, one line of JSON each, until standard input is closed."""
    module, _, name = comparison.partition(":")
    compare = getattr(importlib.import_module(module), name)

    answers = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not be taken for an answer
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that there is no time limit, which the kernel enforces here
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    compare("1", "1")  # imports the libraries
    os.write(answers, b"null\n")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            verdict = compare(*json.loads(line))
        except Exception:  # noqa: BLE001 - algebra on hostile input may raise anything
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        os.write(answers, json.dumps(verdict).encode() + b"\n")


if __name__ == "__main__":
    _serve(sys.argv[1])
