"""The countdown recipe: combine given numbers into a target number.

The problems are generated here. Rows of another source have the columns `nums` and `target`.
"""

import ast
import itertools
import operator
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from groupax.data.examples import Example
from groupax.recipes.recipe import chat, make_recipe
from groupax.rewards.text import completion_text, tagged

NUM_TRAIN = 8192
NUM_HELD_OUT = 500
HELD_OUT_FRAC = 0.1
MAX_NUMBER = 99
MAX_TARGET = 999
MAX_CHARS = 200  # longest expression
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SYSTEM_PROMPT = (
    "Reason inside <think> </think>, then give one expression inside <answer> </answer>, like this: "
    "<think> your reasoning </think><answer> (1 + 2) * 3 </answer>"
)


def problems(num: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """Generates solvable problems. No problem is in both splits, whatever the seeds.

    Args:
        num: Number of problems.
        seed: Seed that determines the problems.
        held_out: Whether to draw from the held-out split.

    Returns:
        Rows with the columns `prompt`, `nums` and `target`.

    Example:
        >>> problems(1, seed=0)[0]["nums"], problems(1, seed=0)[0]["target"]
        ([87, 79, 58, 52], 276)
    """
    rows = ({"nums": nums, "target": target} for nums, target in _draw_problems(seed, held_out))
    return [example(row) for row in itertools.islice(rows, num)]


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt, the numbers and the target."""
    try:
        nums, target = [int(number) for number in row["nums"]], int(row["target"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it needs the columns nums (whole numbers) and target, it has {', '.join(row)}") from error
    listed = ", ".join(map(str, nums))
    user = (
        f"Use each of the numbers {listed} exactly once, with +, -, * and / and parentheses, to make an expression "
        f"that equals {target}."
    )
    return {**chat(SYSTEM_PROMPT, row, user), "nums": nums, "target": target}


def countdown_correct(completions: Sequence[Any], nums: Sequence[Sequence[int]], target: Sequence[int]) -> list[float]:
    """Returns 1 if the last `<answer>` is an expression of exactly these numbers with the target's value, else 0.

    The expression may be followed by `= target`.
    """
    rewards = []
    for completion, numbers, goal in zip(completions, nums, target, strict=True):
        text = completion_text(completion)
        answer = tagged(text, "answer") if "</answer>" in text else ""
        expression, _, claimed = answer.strip().partition("=")
        found = evaluate_expression(expression) if not claimed or claimed.strip() == str(goal) else None
        rewards.append(float(found is not None and found == (Fraction(goal), Counter(numbers))))
    return rewards


def evaluate_expression(expression: str) -> tuple[Fraction, Counter[int]] | None:
    """Returns the value of an expression of whole numbers, and the numbers in it; None for anything else."""
    used: Counter[int] = Counter()

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                used[number] += 1
                return Fraction(number)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError("not whole numbers, +, -, *, / and parentheses")

    if len(expression) > MAX_CHARS:
        return None
    try:
        return value(ast.parse(expression.strip(), mode="eval").body), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _draw_problems(seed: int, held_out: bool) -> Iterator[tuple[list[int], int]]:
    rng = random.Random(f"countdown {held_out} {seed}")
    while True:
        nums = [rng.randint(1, MAX_NUMBER) for _ in range(rng.choice((3, 4)))]
        values = [Fraction(number) for number in nums]
        while len(values) > 1:
            rng.shuffle(values)
            a, b = values.pop(), values.pop()
            values.append(rng.choice((operator.add, operator.sub, operator.mul))(a, b))
        target = int(values[0])
        is_held_out = zlib.crc32(f"{sorted(nums)} {target}".encode()) < HELD_OUT_FRAC * 2**32
        if 10 <= target <= MAX_TARGET and is_held_out == held_out:
            yield nums, target


RECIPE = make_recipe(
    Path(__file__).with_suffix(".yaml"),
    example,
    {"train": lambda: problems(NUM_TRAIN, seed=1), "eval": lambda: problems(NUM_HELD_OUT, seed=0, held_out=True)},
)
