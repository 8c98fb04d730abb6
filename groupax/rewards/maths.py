"""Rewards for right answers to mathematical problems. Imports no jax."""

import atexit
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from groupax.printable import visible_record
from groupax.rewards.text import completion_text, tagged

NUMBER = re.compile(r"[-+]?(?:\$\s*)?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)")
MARK = re.compile(r"####[ \t]*")
NUMBERING = re.compile(r"[.):][ \t]+\S")  # behind the number of a heading: `#### 3. Add up`
LATEX_SPACING = re.compile(r"\{,\}|\\[,!]")  # inside a number: 1{,}000, 1\,000, 1,\!000
BRACES = re.compile(r"\\boxed\{|[{}]")
logging.getLogger("math_verify.parser").addFilter(visible_record)  # it logs the whole completion at a timeout
PARSE_SECONDS = 5  # parsing and comparing of one pair; algebra on hostile input may not end


def gsm8k_accuracy(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 if a completion's final number equals the gold one, as numbers: 1,000 is 1000.0; else 0.

    A completion's final number stands directly behind the last `####`, in the last `<answer>`, in the last `\\boxed{}`,
    or is the last number at all, whichever of these comes first. A heading (`#### Step 3`, `#### 3. Add up`) is no such
    `####`. A sign counts only directly before the number or its `$`.

    Args:
        completions: of the policy.
        answer: GSM8K's worked answers (`... #### 42`) or bare numbers.

    Returns:
        None where the gold answer has no number.
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        expected = final_number(str(gold))
        found = final_number(completion_text(completion))
        rewards.append(None if expected is None else float(found is not None and found == expected))
    return rewards


def final_number(text: str) -> Decimal | None:
    """The number that a text ends in (see `gsm8k_accuracy`), or None."""
    text = LATEX_SPACING.sub("", text)
    marked = _marked_number(text)
    if marked is not None:
        return marked
    answer = tagged(text, "answer")
    boxed = last_boxed(answer)
    return _last_number(answer if boxed is None else boxed)


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` that closes. Its braces may be nested."""
    opened: list[int | None] = []  # where the content of a box begins; None for other braces
    begin = end = -1
    for brace in BRACES.finditer(text):
        if brace[0] != "}":
            opened.append(None if brace[0] == "{" else brace.end())
        elif opened and (start := opened.pop()) is not None and start > begin:
            begin, end = start, brace.start()
    return None if end < 0 else text[begin:end]


def math_accuracy(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 if a completion's last mathematical expression equals the gold answer by math-verify; else 0.

    Args:
        completions: of the policy; `\\boxed{}` is preferred to other LaTeX and that to plain numbers.
        answer: gold answers: an expression (`\\frac{3}{4}`, `0.75`) or a solution with the answer in `\\boxed{}`.

    Returns:
        None where there is no gold answer or it cannot be read. A pair that takes longer than 5 s counts as wrong.

    Raises:
        ImportError: math-verify is not installed (`pip install groupax[math]`).
    """
    try:
        import math_verify
    except ImportError as error:
        raise ImportError("math_accuracy needs math-verify: pip install 'groupax[math]'") from error
    del math_verify
    compared = compare if threading.current_thread() is threading.main_thread() else _COMPARER
    pairs = zip(completions, answer, strict=True)
    return [None if gold is None else compared(completion_text(completion), str(gold)) for completion, gold in pairs]


def compare(text: str, gold: str, seconds: int = PARSE_SECONDS) -> float | None:
    """One completion against its gold answer. Only in a main thread: the time limit rests on a signal."""
    from math_verify import parse, verify

    is_latex = "\\boxed" in gold or re.search(r"(?<!\\)\$", gold)
    expected = parse(gold if is_latex else f"${gold}$", parsing_timeout=seconds)
    if not expected:
        return None
    found = parse(text, parsing_timeout=seconds)
    return float(bool(found) and verify(expected, found, timeout_seconds=seconds))


class _Comparer:
    """A process that compares, for threads, where `compare` has no time limit. It is killed if it takes too long.

    It is a fresh interpreter rather than a fork or a spawned copy of this one, so that it neither inherits jax's
    threads nor runs the user's script again.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self, text: str, gold: str) -> float | None:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                command = [sys.executable, "-m", "groupax.rewards.maths"]
                self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            requests, answers = self.process.stdin, self.process.stdout
            assert requests, "a pipe"
            assert answers, "a pipe"
            requests.write(json.dumps([text, gold]).encode() + b"\n")
            requests.flush()
            # the first answer waits for its imports too
            readable, _, _ = select.select([answers], [], [], 12 * PARSE_SECONDS)
            line = answers.readline() if readable else b""
            if not line:
                self.process.kill()
                self.process.wait()
                return 0.0
            return json.loads(line)

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


_COMPARER = _Comparer()
atexit.register(_COMPARER.close)


def _serve() -> None:
    """Answer comparisons, a line of JSON each, until the other side closes."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        os.write(answers, json.dumps(compare(*json.loads(line))).encode() + b"\n")


def _marked_number(text: str) -> Decimal | None:
    """The number directly behind the last `####` that has one."""
    last = None
    for mark in MARK.finditer(text):
        number = NUMBER.match(text, mark.end())
        if number and not NUMBERING.match(text, number.end()):
            last = number[0]
    return None if last is None else _last_number(last)


def _last_number(text: str) -> Decimal | None:
    return next(reversed(_numbers(text)), None)


def _numbers(text: str) -> list[Decimal]:
    found = []
    for match in NUMBER.findall(text):
        try:
            found.append(Decimal(re.sub(r"[,$\s]", "", match)))
        except InvalidOperation:  # a sign or a dollar without digits
            continue
    return found


if __name__ == "__main__":
    _serve()
