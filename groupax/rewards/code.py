"""Rewards for programs that pass tests. Imports no jax."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from groupax.rewards.sandbox import Limits, passes
from groupax.rewards.text import completion_text

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code_tests(
    completions: Sequence[Any],
    prompts: Sequence[Any],
    tests: Sequence[Any],
    entry_point: Sequence[str] | None = None,
    *,
    sandbox: Literal["bwrap", "none"] = "bwrap",
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    partial_credit: bool = False,
) -> list[float | None]:
    """1 for a Python solution that passes its tests; else 0. Runs in a sandbox (see `rewards.sandbox`).

    The solution is the completion's last fenced code block, or the whole completion. If it does not define
    `entry_point`, it is taken as the continuation of the prompt, as in HumanEval.

    Args:
        completions: of the policy.
        prompts: what they continue.
        tests: for each, Python source that raises if the solution is wrong, or a list of such sources. A `check` that
            the source defines is called with the entry point (HumanEval).
        entry_point: name of the function to test.
        sandbox: "none" runs the code with this process's rights.
        timeout_s: for a solution and all of its tests.
        memory_mb: for each of its processes.
        partial_credit: the share of passed tests in place of all or nothing, where tests come as a list.

    Returns:
        None where there are no tests.

    Raises:
        RuntimeError: there is no bubblewrap.
    """
    limits = Limits(seconds=timeout_s, memory_bytes=memory_mb << 20)
    names = [""] * len(completions) if entry_point is None else entry_point

    def reward(index: int) -> float | None:
        pieces = [tests[index]] if isinstance(tests[index], str) else list(tests[index] or ())
        if not any(piece.strip() for piece in pieces):
            return None
        solution = program(completion_text(completions[index]), prompts[index], names[index])
        runs = pieces if partial_credit else ["\n".join(pieces)]
        results = [passes(solution, _with_call(source, names[index]), limits, sandbox) for source in runs]
        return sum(results) / len(results)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(reward, range(len(completions))))


def program(completion: str, prompt: Any, entry_point: str) -> str:
    """The Python source in a completion."""
    blocks = FENCED.findall(completion)
    source = blocks[-1] if blocks else completion
    defined = (
        re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(entry_point)}\b", source, re.MULTILINE) if entry_point else True
    )
    return source if defined or not isinstance(prompt, str) else prompt + source


def _with_call(tests: str, entry_point: str) -> str:
    defines_check = re.search(r"^def check\(", tests, re.MULTILINE)
    return f"{tests}\ncheck({entry_point})\n" if defines_check and entry_point else tests
