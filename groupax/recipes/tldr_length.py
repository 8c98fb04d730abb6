"""The tldr_length recipe: summaries of a wanted length, the smallest thing that shows whether training works.

Rows have the column `prompt`, as in the hub's trl-lib/tldr; a reference summary (`completion`) is left out.
"""

from collections.abc import Sequence
from typing import Any

from groupax.data.examples import Example
from groupax.recipes import make_recipe
from groupax.rewards.text import completion_text


def example(row: Example) -> dict[str, Any]:
    """The row's prompt.

    Raises:
        ValueError: there is none.
    """
    if not row.get("prompt"):
        raise ValueError(f"it has no prompt; it has {', '.join(row)}")
    return {"prompt": row["prompt"]}


def near_length(completions: Sequence[Any], *, target: int = 20) -> list[float]:
    """How far a completion is from a length, as a negative number.

    Args:
        completions: of the policy.
        target: in characters.
    """
    return [-float(abs(target - len(completion_text(completion)))) for completion in completions]


RECIPE = make_recipe(__file__, example)
