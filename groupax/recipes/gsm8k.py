"""The gsm8k recipe: grade-school word problems, with a gold answer after `####`.

Rows have the columns `question` and `answer`, as in the hub's openai/gsm8k; MIT license.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupax.data.examples import Example
from groupax.recipes.recipe import chat, gold, make_recipe, question
from groupax.rewards.formats import xml_format

SYSTEM_PROMPT = """Solve the problem step by step. Answer in exactly this form, with nothing before or after it:
<think>
your reasoning
</think>
<answer>
the final number, in digits and nothing else
</answer>"""
NUMBER = re.compile(r"[-+]?\$?\s*[\d,]*\.?\d+")


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt and the gold number."""
    number = gold(row)
    if not NUMBER.fullmatch(number):
        raise ValueError(f"its answer {number[:80]!r} is not a number; for other mathematics use the recipe numinamath")
    return {**chat(SYSTEM_PROMPT, row, question(row)), "answer": number}


def strict_xml_format(completions: Sequence[Any]) -> list[float]:
    """Returns the strict `xml_format`, under a separate name in the metrics."""
    return xml_format(completions, strict=True)


RECIPE = make_recipe(Path(__file__).with_suffix(".yaml"), example)
