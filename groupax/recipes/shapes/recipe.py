"""The shapes recipe: a small model inside the package, which sees images, learns to look before it answers.

The model was pretrained on answers of mixed quality (see `model/README.md`). It can name the shapes of a picture one by
one and then count, but mostly guesses. The rewards are for an answer in the form
`<think>...</think><answer>...</answer>`, and mainly for a correct one. Rows of another source have the columns
`prompt` (such as `How many red shapes?`), `image` and `answer`.
"""

from typing import Any

from groupax.data.examples import Example
from groupax.recipes import make_recipe
from groupax.recipes.shapes.scenes import generate

NUM_TRAIN = 2048
NUM_HELD_OUT = 300


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt, the image and the answer.

    Raises:
        ValueError: One of them is missing.
    """
    if not row.get("prompt") or row.get("image") is None or row.get("answer") is None:
        raise ValueError(f"it needs the columns prompt, image and answer, it has {', '.join(row)}")
    prompt = row["prompt"]
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"prompt": prompt, "image": row["image"], "answer": str(row["answer"])}


RECIPE = make_recipe(
    __file__,
    example,
    {"train": lambda: generate(NUM_TRAIN, seed=1), "eval": lambda: generate(NUM_HELD_OUT, seed=0, split="held_out")},
)
