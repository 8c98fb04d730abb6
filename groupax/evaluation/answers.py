"""The answers of completions, for counting votes (maj@k). Imports no jax."""

import re
from collections.abc import Callable

from groupax.rewards.answers import final_number, number_text
from groupax.rewards.maths import last_boxed
from groupax.rewards.text import final_part

# Rewards whose 1 means that a completion is correct, and the kind of its answer (see `ANSWERS`); None where answers
# cannot be compared with each other, so that there is no vote.
ACCURACY_REWARDS: dict[str, str | None] = {
    "gsm8k_accuracy": "number",
    "math_accuracy": "math",
    "think_answer_correct": "tagged",
    "countdown_correct": None,
    "code_tests": None,
}


def number_answer(text: str) -> str | None:
    """Returns the final number of a completion, as `gsm8k_accuracy` reads it."""
    number = final_number(text)
    return None if number is None else number_text(number)


def tagged_answer(text: str) -> str | None:
    """Returns the content of the last `<answer>...</answer>`."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def math_answer(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{}`, else of the last `<answer>`, else the last number.

    Spacing and the size of LaTeX's brackets and fractions are ignored. Two notations of one value are two answers here;
    those that the reward calls correct still count as one (see `items.votes`).
    """
    text = final_part(text)
    boxed = last_boxed(text)
    answer = boxed if boxed is not None else tagged_answer(text)
    if answer is None:
        return number_answer(text)
    answer = re.sub(r"\\(?:left|right|,|!|;|:| )|\s|\$", "", answer)
    return re.sub(r"\\[dt]frac", r"\\frac", answer).rstrip(".") or None


# By the kinds in `ACCURACY_REWARDS`.
ANSWERS: dict[str, Callable[[str], str | None]] = {
    "number": number_answer,
    "math": math_answer,
    "tagged": tagged_answer,
}
