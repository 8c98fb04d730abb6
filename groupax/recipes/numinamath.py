r"""The numinamath recipe: mathematics of competitions, with answers that math-verify compares.

Rows have the columns `problem` and `solution` (the answer in `\boxed{}`), as in the hub's AI-MO/NuminaMath-TIR
(Apache-2.0), or `answer`, as in MATH-500 and GSM8K.
"""

from typing import Any

from groupax.data.examples import Example
from groupax.recipes import make_recipe
from groupax.recipes.rows import chat, gold, question

SYSTEM_PROMPT = (
    "Solve the problem. First reason inside <think> </think>, then give the answer inside <answer> </answer>, like "
    r"this: <think> your reasoning </think><answer> \boxed{the answer} </answer>"
)


def example(row: Example) -> dict[str, Any]:
    """A row with the conversation to continue and the gold answer, or the solution that has it.

    Raises:
        ValueError: there is no problem, or nothing to compare an answer with.
    """
    return {**chat(SYSTEM_PROMPT, row, question(row)), "answer": gold(row)}


RECIPE = make_recipe(__file__, example)
