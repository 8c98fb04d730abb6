"""Rewards for correct answers to mathematical problems. Imports no jax."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from groupax.errors import require
from groupax.rewards.answers import final_expression
from groupax.rewards.math_process import COMPARER
from groupax.rewards.numbers import final_number
from groupax.rewards.text import boxes, completion_text


def gsm8k_accuracy(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns 1 if a completion's final number equals the gold one in value (`1,000` is `1000.0`), else 0.

    `numbers.final_number` defines the final number of a text. A heading (`#### Step 3`, `#### 3. Add up`) is not an
    answer after `####`. A sign counts only directly before the number or its currency.

    Args:
        completions: Completions of the policy.
        answer: Gold answers: GSM8K's solutions (`... #### 42`) or plain numbers.

    Returns:
        A reward per completion; None where the gold answer has no number.
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        expected = final_number(str(gold))
        found = final_number(completion_text(completion))
        rewards.append(None if expected is None else float(found is not None and found == expected))
    return rewards


def math_accuracy(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns 1 if a completion's answer equals the gold one as a mathematical expression, else 0.

    `answers.final_expression` defines the answer of a completion (the last `\boxed{}`, if there is one), and
    `expressions.equal` when two expressions are equal: math-verify compares their values, but a relation, a chain or a
    list does not pass for a number.

    Args:
        completions: Completions of the policy.
        answer: Gold answers: an expression (`\frac{3}{4}`, `0.75`, `x \ge 5`) or a solution with the answer in
            `\boxed{}` or `$...$`.

    Returns:
        A reward per completion; None where there is no gold answer or it cannot be parsed. A pair that takes more than
        5 s of CPU time or 4 GiB counts as wrong.

    Raises:
        ImportError: math-verify is not installed (`pip install groupax[math]`).
    """
    require("math", "math_accuracy", is_imported=False)
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        expected = gold_expression(gold)
        found = final_expression(completion_text(completion))
        right = None if not expected else COMPARER(found or "", expected)
        rewards.append(None if right is None else float(right))
    return rewards


def gold_expression(gold: Any) -> str:
    r"""Returns the expression of a gold answer: the content of `\boxed{}` or `$...$`, else all of it; "" for none."""
    if gold is None or gold != gold:  # tables use NaN for a missing value
        return ""
    if isinstance(gold, float) and math.isfinite(gold):
        return format(Decimal(repr(gold)), "f")
    gold = str(gold)
    marked = r"\boxed" in gold or "$" in gold.replace(r"\$", "")
    return (final_expression(gold) or "") if marked else gold


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` that is closed. Braces may be nested."""
    found = boxes(text)
    return found[-1].content if found else None
