"""The arithmetic recipe: a small model inside the package learns to think before it answers.

The model was pretrained on answers of mixed quality (see `model/README.md`). It can solve a problem step by step, but
mostly guesses. The rewards are for an answer in the form `<think>...</think><answer>...</answer>`, and mainly for a
correct one. Rows of another source have the columns `prompt` (such as `8*(2+5)-17=`) and `answer`.
"""

from typing import Any

from groupax.data.examples import Example
from groupax.recipes import make_recipe
from groupax.recipes.arithmetic.problems import generate

NUM_TRAIN = 4096
NUM_HELD_OUT = 500


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt and the answer.

    Raises:
        ValueError: One of them is missing.
    """
    if not row.get("prompt") or row.get("answer") is None:
        raise ValueError(f"it needs the columns prompt and answer, it has {', '.join(row)}")
    return {"prompt": row["prompt"], "answer": str(row["answer"])}


RECIPE = make_recipe(
    __file__,
    example,
    {"train": lambda: generate(NUM_TRAIN, seed=1), "eval": lambda: generate(NUM_HELD_OUT, seed=0, split="held_out")},
)
