"""The tldr_length recipe: summaries of a given length, the simplest task that shows whether training works.

Rows have the column `prompt`, as in the hub's trl-lib/tldr; a reference summary (`completion`) is ignored.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupax.data.examples import Example
from groupax.recipes.recipe import make_recipe
from groupax.rewards.text import completion_text


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt."""
    if not row.get("prompt"):
        raise ValueError(f"it has no prompt; it has {', '.join(row)}")
    return {"prompt": row["prompt"]}


def near_length(completions: Sequence[Any], *, target: int = 20) -> list[float]:
    """Returns minus the distance of a completion's length from the target length.

    Args:
        completions: Completions of the policy.
        target: Target length in characters.
    """
    return [-float(abs(target - len(completion_text(completion)))) for completion in completions]


RECIPE = make_recipe(Path(__file__).with_suffix(".yaml"), example)
