"""The calculator recipe: a small model inside the package learns to use a calculator. Imports no jax.

The model was pretrained on conversations of mixed quality (see `model/README.md`): it can call the calculator, but
mostly guesses. Rows of another source have the columns `prompt`, a question or a conversation, and `answer`.
"""

import ast
import itertools
import operator
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from groupax.data.examples import Example
from groupax.recipes.recipe import make_recipe
from groupax.rewards.text import completion_text

PROMPT = "What is {}?"
HELD_OUT_FRAC = 0.1
MAX_CHARACTERS = 200  # longest expression that is calculated
NUM_DIGITS = 5  # of the answers; the embedded model copies shorter and longer numbers badly
SHAPES = ("{a}*{b}", "{a}*{b}+{c}", "{a}*{b}-{c}", "({a}+{c})*{b}")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def generate(num: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """Returns rows with the columns `prompt`, a conversation, and `answer`, of five digits, of one of two splits.

    Example:
        >>> generate(1, seed=0)
        [{'prompt': [{'role': 'user', 'content': 'What is 379*42-555?'}], 'answer': '15363'}]
    """
    drawn = ((expression, str(evaluate(expression))) for expression in expressions(seed, held_out))
    fitting = ((expression, answer) for expression, answer in drawn if len(answer) == NUM_DIGITS)
    return [
        {"prompt": [{"role": "user", "content": PROMPT.format(expression)}], "answer": answer}
        for expression, answer in itertools.islice(fitting, num)
    ]


def expressions(seed: int, held_out: bool = False) -> Iterator[str]:
    """Yields expressions with answers of any length, without end."""
    rng = random.Random(f"calculator {held_out} {seed}")
    while True:
        a, b, c = rng.randint(100, 999), rng.randint(12, 99), rng.randint(100, 999)
        expression = rng.choice(SHAPES).format(a=a, b=b, c=c)
        if (zlib.crc32(expression.encode()) < HELD_OUT_FRAC * 2**32) == held_out:
            yield expression


def evaluate(expression: str) -> int:
    """Returns the value of an expression of whole numbers, `+`, `-`, `*` and parentheses, of at most `MAX_CHARACTERS`.

    Example:
        >>> evaluate("348*27+95")
        9491
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError("an expression must consist of whole numbers, +, -, * and parentheses")

    if len(expression) > MAX_CHARACTERS:
        raise ValueError(
            f"the expression has {len(expression)} characters, and at most {MAX_CHARACTERS} are calculated"
        )
    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("that is not an arithmetic expression") from error


NUM_TRAIN = 4096
NUM_HELD_OUT = 250


def calculator(expression: str) -> int:
    """Calculates.

    Args:
        expression: Like 12*34.
    """
    return evaluate(expression)


def answer_correct(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """Returns 1 if the last message of a completion is the answer and nothing else, otherwise 0."""
    return [
        float(completion_text(completion).strip() == gold) for completion, gold in zip(completions, answer, strict=True)
    ]


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt and the answer."""
    prompt = row.get("prompt")
    if not prompt or row.get("answer") is None:
        raise ValueError(f"it needs the columns prompt and answer, it has {', '.join(row)}")
    conversation = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"prompt": conversation, "answer": str(row["answer"])}


RECIPE = make_recipe(
    Path(__file__).with_suffix(".yaml"),
    example,
    {"train": lambda: generate(NUM_TRAIN, seed=1), "eval": lambda: generate(NUM_HELD_OUT, seed=0, held_out=True)},
)
