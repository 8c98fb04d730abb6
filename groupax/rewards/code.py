"""Rewards for programs that pass tests. Imports no jax."""

import ast
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Literal

from groupax.rewards.sandbox import Limits, check_sandbox, passes
from groupax.rewards.text import completion_text

MAX_COMPLETION_CHARS = 1 << 20
# A line with a code fence: what stands before it, its backticks, its info string. Takes linear time.
FENCE = re.compile(r"([^`]*(?:`{1,2}[^`]+)*)(`{3,})([^`]*)")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# What of a prompt the tests may rely upon.
TRUSTED = (ast.Import, ast.ImportFrom, *DEFINITIONS, ast.Assign, ast.AnnAssign)


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

    Solution and tests run in two processes, which exchange data: docs/rewards.md says what crosses between them. If the
    prompt is Python source that defines the entry point, as in HumanEval, the tests see the prompt's other names as the
    prompt defines them, whatever the solution makes of them.

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
        memory_mb: for the solution, and as much for the tests.
        partial_credit: the share of passed tests in place of all or nothing, where tests come as a list.

    Returns:
        None where there are no tests.

    Raises:
        RunError: there is no bubblewrap, or it cannot work here.
    """
    check_sandbox(sandbox)
    limits = Limits(seconds=timeout_s, memory_bytes=memory_mb << 20)
    names = [""] * len(completions) if entry_point is None else [name or "" for name in entry_point]

    def reward(index: int) -> float | None:
        given = [tests[index]] if isinstance(tests[index], str) else list(tests[index] or ())
        pieces = [piece for piece in given if piece and piece.strip()]
        if not pieces:
            return None
        completion = completion_text(completions[index])
        if len(completion) > MAX_COMPLETION_CHARS:
            return 0.0
        solution = program(completion, prompts[index], names[index])
        runs = pieces if partial_credit else ["\n".join(pieces)]
        stub = _stub(_text(prompts[index]), names[index])
        results = [
            passes(solution, _with_call(source, names[index]), limits, sandbox, names[index], stub) for source in runs
        ]
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
        fence = FENCE.fullmatch(line) if "```" in line else None
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


def _text(prompt: Any) -> str:
    """The prompt, or its last message, where that is text."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content") if prompt else None
    return content if isinstance(content, str) else ""


@lru_cache
def _stub(prompt: str, entry_point: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The statements of a prompt that defines the entry point, or of its code block that does, without that definition.

    They are imports, helpers and constants, each with the names that it binds. Empty if the prompt is no such one.
    """
    name = entry_point.rpartition(".")[2]
    for source in [prompt, *python_blocks(prompt)] if name and name in prompt else []:
        try:
            statements = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        found = [each for each in statements if isinstance(each, DEFINITIONS) and _defines(each, name)]
        if found:
            others = [each for each in statements if isinstance(each, TRUSTED) and each not in found]
            return tuple((ast.unparse(each), tuple(_bound(each))) for each in others)
    return ()


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(statement, DEFINITIONS):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    return [each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def _defines(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(each, DEFINITIONS) and each.name == name for each in ast.walk(statement))


def _with_call(tests: str, entry_point: str) -> str:
    defines_check = re.search(r"^def check\(", tests, re.MULTILINE)
    return f"{tests}\ncheck({entry_point})\n" if defines_check and entry_point else tests
