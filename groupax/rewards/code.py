"""Rewards for programs that pass tests. Imports no jax."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from groupax.rewards.sandbox import Limits, passes
from groupax.rewards.text import completion_text

# A line with a code fence: what stands before it, its backticks, its info string.
FENCE = re.compile(r"((?:[^`]|(?<!`)`{1,2}(?!`))*)(`{3,})([^`]*)")


def code_tests(
    completions: Sequence[Any],
    prompts: Sequence[Any],
    tests: Sequence[Any],
    entry_point: Sequence[str | None] | None = None,
    *,
    sandbox: Literal["bwrap", "none"] = "bwrap",
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    partial_credit: bool = False,
) -> list[float | None]:
    """1 for a Python solution that passes its tests; else 0. Runs in a sandbox (see `rewards.sandbox`).

    The solution is the completion's last code block that is fenced as Python or as no language, or else the whole
    completion. If it does not define `entry_point`, it is taken as the continuation of the prompt, as in HumanEval.

    Args:
        completions: of the policy.
        prompts: what they continue.
        tests: for each, Python source that raises if the solution is wrong, or a list of such sources. A `check` that
            the source defines is called with the entry point (HumanEval).
        entry_point: name of the function to test, None or empty for none.
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
    names = [""] * len(completions) if entry_point is None else [name or "" for name in entry_point]

    def reward(index: int) -> float | None:
        given = [tests[index]] if isinstance(tests[index], str) else list(tests[index] or ())
        pieces = [piece for piece in given if piece and piece.strip()]
        if not pieces:
            return None
        solution = program(completion_text(completions[index]), prompts[index], names[index])
        runs = pieces if partial_credit else ["\n".join(pieces)]
        results = [passes(solution, _with_call(source, names[index]), limits, sandbox) for source in runs]
        return sum(results) / len(results)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(reward, range(len(completions))))


def program(completion: str, prompt: Any, entry_point: str) -> str:
    """The Python source in a completion."""
    blocks = python_blocks(completion)
    source = blocks[-1] if blocks else completion
    # not \s, which would try every run of empty lines from each of its lines
    definition = rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}\b"
    defined = re.search(definition, source, re.MULTILINE) if entry_point else True
    return source if defined or not isinstance(prompt, str) else prompt + source


def python_blocks(text: str) -> list[str]:
    """The code blocks that are fenced as Python (`py`, `python`, `Python3`) or as no language, in their order.

    Fences pair line by line as in CommonMark (0.31, section 4.5), except that they may stand behind other text, and one
    with an info string ends the block before it. A block that never ends counts only if no other does.
    """
    blocks: list[str] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        fence = FENCE.fullmatch(line)
        if opening and not (fence and _ends(fence, opening)):
            lines.append(line)
        elif fence:
            if opening and _is_python(opening):
                blocks.append("".join([*lines, fence[1]]))
            closes = opening is not None and not fence[3].strip()
            opening, lines = (fence if not closes and _opens(fence) else None), []
    if opening and _is_python(opening) and not blocks:
        blocks.append("".join(lines))
    return blocks


def _opens(fence: re.Match[str]) -> bool:
    before, _, info = fence.groups()
    return not before.strip() or re.fullmatch(r"\w*\s*", info) is not None


def _ends(fence: re.Match[str], opening: re.Match[str]) -> bool:
    before, ticks, info = fence.groups()
    if len(ticks) < len(opening[2]):
        return False
    if before.strip():
        return not info.strip()
    return len(before) <= len(opening[1]) + 3  # deeper, it belongs to the code: to a docstring, say


def _is_python(opening: re.Match[str]) -> bool:
    language = "".join(opening[3].lower().split()[:1])
    return language in ("", "py") or language.startswith("python")


def _with_call(tests: str, entry_point: str) -> str:
    defines_check = re.search(r"^def check\(", tests, re.MULTILINE)
    return f"{tests}\ncheck({entry_point})\n" if defines_check and entry_point else tests
