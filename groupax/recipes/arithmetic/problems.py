"""The arithmetic recipe: a small model inside the package learns to think before it answers.

The model was pretrained on answers of mixed quality (see `model/README.md`). It can solve a problem step by step, but
mostly guesses. The rewards are for an answer in the form `<think>...</think><answer>...</answer>`, and mainly for a
correct one. Rows of another source have the columns `prompt` (such as `8*(2+5)-17=`) and `answer`.
"""

import ast
import itertools
import operator
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groupax.data.examples import Example
from groupax.recipes.recipe import Split, draw_split, make_recipe

PROMPT = "{}="
MAX_VALUE = 99
HELD_OUT_FRAC = 0.1
# Number of operands of a problem -> how often it occurs.
OPERAND_SHARES = {2: 0.2, 3: 0.4, 4: 0.4}
OPERATORS = {ast.Add: ("+", operator.add), ast.Sub: ("-", operator.sub), ast.Mult: ("*", operator.mul)}
PRECEDENCE = {"+": 1, "-": 1, "*": 2}


def generate(num: int, seed: int, split: Split = "train") -> list[dict[str, str]]:
    """Returns rows with the columns `prompt` and `answer`. No problem is in both splits; it may occur twice in one.

    The seed determines the problems; a shorter list is the start of a longer one.

    Example:
        >>> generate(1, seed=0)
        [{'prompt': '22*(1+2)=', 'answer': '66'}]
    """
    if num < 0:
        raise ValueError(f"num must be at least 0, got {num}")
    drawn = itertools.islice(expressions(seed, split), num)
    return [{"prompt": PROMPT.format(expression), "answer": solve(expression)} for expression in drawn]


def expressions(seed: int, split: Split = "train") -> Iterator[str]:
    """Returns an iterator over the expressions of `generate`, without end."""
    return draw_split(_draw, is_held_out, seed, split)


def is_held_out(expression: str) -> bool:
    """Returns whether an expression is in the held-out split, by its hash."""
    return zlib.crc32(expression.encode()) < HELD_OUT_FRAC * 2**32


def worked_steps(expression: str) -> list[str]:
    """Returns the steps to the answer, one operation each, in the order in which an expression is read.

    Example:
        >>> worked_steps("8*(2+5)-17")
        ['2+5=7', '8*7=56', '56-17=39']
    """
    steps: list[str] = []

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                symbol, apply = OPERATORS[type(op)]
                a, b = value(left), value(right)
                steps.append(f"{a}{symbol}{b}={apply(a, b)}")
                return apply(a, b)
        raise ValueError(f"{expression!r} must consist of whole numbers, +, -, * and parentheses")

    value(_parse(expression))
    return steps


def solve(expression: str) -> str:
    """Returns the answer.

    Example:
        >>> solve("8*(2+5)-17")
        '39'
    """
    steps = worked_steps(expression)
    return steps[-1].partition("=")[2] if steps else expression


def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression: {error.msg}") from error


def _draw(rng: random.Random) -> str:
    num_operands = rng.choices(list(OPERAND_SHARES), list(OPERAND_SHARES.values()))[0]
    return _expression(rng, num_operands, rng.randint(0, MAX_VALUE))[0]


def _expression(rng: random.Random, num_operands: int, value: int) -> tuple[str, int]:
    """Returns an expression with this value, and the precedence of its outermost operator."""
    if num_operands == 1:
        return str(value), 3
    symbol, a, b = _operation(rng, value)
    # The largest of three draws, so that long left sides, as in `a+b-c`, are the usual case.
    num_left = max(rng.randint(1, num_operands - 1) for _ in range(3))
    left, left_binds = _expression(rng, num_left, a)
    right, right_binds = _expression(rng, num_operands - num_left, b)
    binds = PRECEDENCE[symbol]
    left = f"({left})" if left_binds < binds else left
    right = f"({right})" if right_binds <= binds else right
    return f"{left}{symbol}{right}", binds


def _operation(rng: random.Random, value: int) -> tuple[str, int, int]:
    """Returns an operator and two positive operands with the result `value`."""
    factors = [a for a in range(2, value) if value % a == 0]
    symbols = [*("*" if factors else ""), *("+" if value >= 2 else ""), *("-" if value < MAX_VALUE else "")]
    symbol = rng.choice(symbols)
    if symbol == "*":
        a = rng.choice(factors)
        return symbol, a, value // a
    if symbol == "+":
        a = rng.randint(1, value - 1)
        return symbol, a, value - a
    a = rng.randint(value + 1, MAX_VALUE)
    return symbol, a, a - value


NUM_TRAIN = 4096
NUM_HELD_OUT = 500


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt and the answer."""
    if not row.get("prompt") or row.get("answer") is None:
        raise ValueError(f"it needs the columns prompt and answer, it has {', '.join(row)}")
    return {"prompt": row["prompt"], "answer": str(row["answer"])}


RECIPE = make_recipe(
    Path(__file__).with_suffix(".yaml"),
    example,
    {"train": lambda: generate(NUM_TRAIN, seed=1), "eval": lambda: generate(NUM_HELD_OUT, seed=0, split="held_out")},
)
