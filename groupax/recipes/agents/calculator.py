"""The calculator recipe: a small model inside the package learns to use a calculator. Imports no jax.

The model was pretrained on conversations of mixed quality (see `model/README.md`): it can call the calculator, but
mostly guesses. Rows of another source have the columns `prompt`, a question or a conversation, and `answer`.
"""

from collections.abc import Sequence
from typing import Any

from groupax.data.examples import Example
from groupax.recipes import make_recipe
from groupax.recipes.agents.arithmetic import evaluate, generate
from groupax.rewards.text import completion_text

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
    """Returns a row with the prompt and the answer.

    Raises:
        ValueError: One of them is missing.
    """
    prompt = row.get("prompt")
    if not prompt or row.get("answer") is None:
        raise ValueError(f"it needs the columns prompt and answer, it has {', '.join(row)}")
    conversation = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"prompt": conversation, "answer": str(row["answer"])}


RECIPE = make_recipe(
    __file__,
    example,
    {"train": lambda: generate(NUM_TRAIN, seed=1), "eval": lambda: generate(NUM_HELD_OUT, seed=0, held_out=True)},
)
