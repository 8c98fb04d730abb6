"""A reward for programs that pass tests. Imports no jax."""

import ast
import os
import re
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from groupax.rewards.sandbox import Limits, Sandbox, check_sandbox, passes
from groupax.rewards.text import completion_text

MAX_COMPLETION_CHARS = 1 << 20
# A line with a code fence: the text before it, its backticks, its info string. Matching takes linear time.
FENCE = re.compile(r"([^`]*(?:`{1,2}[^`]+)*)(`{3,})([^`]*)")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Statements of a prompt that the tests may rely on.
TRUSTED = (ast.Import, ast.ImportFrom, *DEFINITIONS, ast.Assign, ast.AnnAssign)


def code_tests(
    completions: Sequence[Any],
    prompts: Sequence[Any],
    tests: Sequence[Any],
    entry_point: Sequence[str | None] | None = None,
    *,
    sandbox: Sandbox = "bwrap",
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    partial_credit: bool = False,
) -> list[float | None]:
    """Returns 1 for a Python solution that passes its tests, run in a sandbox (see `rewards.sandbox`), else 0.

    Solution and tests run in two processes that exchange data (see docs/rewards.md). If the prompt is Python source
    that defines the entry point, as in HumanEval, the tests see the prompt's other names as the prompt defines them,
    even if the solution redefines them.

    The solution is the last code block after the thinking that defines `entry_point`, else the last one that is fenced
    as Python, else as no language, else the whole completion; without an `entry_point` blocks that define a function or
    a class come first. If it does not define `entry_point`, it is taken as the continuation of the prompt, as in
    HumanEval.

    Args:
        completions: Completions of the policy.
        prompts: Their prompts.
        tests: For each, Python source that raises if the solution is wrong, or a list of such sources. If the source
            defines `check`, it is called with the entry point (HumanEval).
        entry_point: Name of the function to test; None or empty for none.
        sandbox: "none" runs the code with the permissions of this process.
        timeout_s: Time limit for a solution with all of its tests.
        memory_mb: Memory limit of the solution, and also of the tests.
        partial_credit: Whether to return the fraction of passed tests if the tests are a list.

    Returns:
        A reward per completion; None where there are no tests.

    Raises:
        RunError: bubblewrap is not installed, or it cannot work here.
    """
    check_sandbox(sandbox)
    limits = Limits(seconds=timeout_s, memory_bytes=memory_mb << 20)
    names = [""] * len(completions) if entry_point is None else [name or "" for name in entry_point]

    def reward(completion: Any, prompt: Any, sources: Any, name: str) -> float | None:
        text = completion_text(completion).rpartition("</think>")[2]
        sources = [sources] if isinstance(sources, str) else list(sources or ())
        sources = [source for source in sources if source and source.strip()]
        if not sources or len(text) > MAX_COMPLETION_CHARS:
            return 0.0 if sources else None
        solution, stub = program(text, prompt, name), _stub(_prompt_text(prompt), name)
        results = []
        for source in sources if partial_credit else ["\n".join(sources)]:
            calls_check = name and re.search(r"^def check\(", source, re.MULTILINE)
            checked = f"{source}\ncheck({name})\n" if calls_check else source
            results.append(passes(solution, checked, limits, sandbox, name, stub))
        return sum(results) / len(results)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(reward, completions, prompts, tests, names))


def program(completion: str, prompt: Any, entry_point: str) -> str:
    """Returns the Python source in a completion, preceded by the prompt if it does not define the entry point.

    It is the last block that defines the entry point, or any function or class if there is none; or else the last one
    fenced as Python, or as no language. A block that the prompt has opened continues in the completion.
    """
    blocks = _blocks(_open_block(_prompt_text(prompt)) + completion)
    name = re.escape(re.split(r"\W+", entry_point.rstrip("()"))[-1])
    # not \s, which would try every sequence of empty lines from each of its lines
    any_of_name = rf"{name}\b|^{name}[ \t]*=" if name else r"\w"
    definition = re.compile(rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+{any_of_name}", re.MULTILINE)
    defining = [source for _, source in blocks if definition.search(source)]
    python = [source for language, source in blocks if language]
    source = [completion, *(source for _, source in blocks)][-1]
    source = (defining or python or [source])[-1]
    if not name or definition.search(source):
        return textwrap.dedent(source)
    return prompt + source if isinstance(prompt, str) else source


def _open_block(prompt: str) -> str:
    """Returns the code block that a prompt begins as Python and does not end, with its fence."""
    opened = ""
    for line in prompt.splitlines(keepends=True):
        fence = FENCE.fullmatch(line)
        if opened:
            opened = "" if fence and not fence[3].strip() else opened + line
        elif fence and _opens(fence) and _is_python(fence) and fence[3].strip():
            opened = line
    return opened if not opened or opened.endswith("\n") else f"{opened}\n"


def _blocks(text: str) -> list[tuple[str, str]]:
    """Returns the language and the source of the blocks that are fenced as Python or as no language, in order.

    Fences of backticks pair line by line as in CommonMark (0.31, section 4.5), except that they may follow other text,
    and that one with an info string ends the block before it. A block without an end counts only if there is no other
    block. Lines lose the indentation, or the marks of quotation, of their fence.
    """
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []

    def add(opening: re.Match[str], rest: str) -> None:
        width = len(opening[1]) if not re.search(r"[^\s\d.)*+>-]", opening[1]) else 0
        prefix = re.compile(rf"[ \t>]{{0,{width}}}")
        source = "".join(line[found.end() :] if (found := prefix.match(line)) else line for line in lines)
        blocks.append((opening[3].strip(), source + rest * bool(rest.strip(" \t>"))))

    for line in text.splitlines(keepends=True):
        fence = FENCE.fullmatch(line) if "```" in line else None
        if opening and not (fence and _ends(fence, opening)):
            lines.append(line)
        elif fence:
            if opening and _is_python(opening):
                add(opening, fence[1])
            closes = opening is not None and not fence[3].strip()
            opening, lines = (fence if not closes and _opens(fence) else None), []
    if opening and _is_python(opening) and not blocks:
        add(opening, "")
    return blocks


def _opens(fence: re.Match[str]) -> bool:
    return not fence[1].strip() or re.fullmatch(r"\w*\s*", fence[3]) is not None


def _ends(fence: re.Match[str], opening: re.Match[str]) -> bool:
    if len(fence[2]) < len(opening[2]):
        return False
    if fence[1].strip():
        return not fence[3].strip()
    return len(fence[1]) <= len(opening[1]) + 3  # a deeper one belongs to the code, for example to a docstring


def _is_python(opening: re.Match[str]) -> bool:
    language = "".join(re.findall(r"[^\s{}]+", opening[3].lower())[:1]).removeprefix(".")  # {.python .numbered}
    return language in ("", "py") or language.startswith("python")


def _prompt_text(prompt: Any) -> str:
    """Returns the prompt, or its last message, if that is text."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content") if prompt else None
    return content if isinstance(content, str) else ""


@lru_cache
def _stub(prompt: str, entry_point: str) -> tuple[str, ...]:
    """Returns the imports, helpers and constants of a prompt, or of its code block, that defines the entry point.

    There are none if no source defines it.
    """
    name = entry_point.rpartition(".")[2]
    for source in [prompt, *(source for _, source in _blocks(prompt))] if name and name in prompt else []:
        try:
            statements = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        found = [
            each
            for each in statements
            if isinstance(each, DEFINITIONS)
            and any(isinstance(inner, DEFINITIONS) and inner.name == name for inner in ast.walk(each))
        ]
        if found:
            return tuple(ast.unparse(each) for each in statements if isinstance(each, TRUSTED) and each not in found)
    return ()
