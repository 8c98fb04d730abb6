r"""The numinamath recipe: competition mathematics, with answers that are compared by math-verify.

Rows have the columns `problem` and `solution` (the answer in `\boxed{}`), as in the hub's AI-MO/NuminaMath-TIR
(Apache-2.0), or `answer`, as in MATH-500 and GSM8K.
"""

from pathlib import Path
from typing import Any

from groupax.data.examples import Example
from groupax.recipes.recipe import chat, gold, make_recipe, question

SYSTEM_PROMPT = (
    "Solve the problem. First reason inside <think> </think>, then give the answer inside <answer> </answer>, like "
    r"this: <think> your reasoning </think><answer> \boxed{the answer} </answer>"
)


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt and the gold answer, or the solution that contains it."""
    return {**chat(SYSTEM_PROMPT, row, question(row)), "answer": gold(row)}


RECIPE = make_recipe(Path(__file__).with_suffix(".yaml"), example)
