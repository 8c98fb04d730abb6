"""Rewards by name. Imports no jax."""

import re
from collections.abc import Sequence
from typing import Any

from groupax.rewards.text import completion_text

THINK_ANSWER = re.compile(r"\s*<think>(?P<think>.+?)</think>\s*<answer>(?P<answer>.+?)</answer>\s*", re.DOTALL)


def think_answer_format(completions: Sequence[Any]) -> list[float]:
    """1 for a completion that is `<think>...</think><answer>...</answer>`, neither of them empty; else 0."""
    return [float(THINK_ANSWER.fullmatch(completion_text(completion)) is not None) for completion in completions]


def think_answer_correct(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    """1 for a completion in that format whose answer is exactly the column `answer`; else 0."""
    matches = [THINK_ANSWER.fullmatch(completion_text(completion)) for completion in completions]
    return [
        float(match is not None and match["answer"].strip() == str(gold).strip())
        for match, gold in zip(matches, answer, strict=True)
    ]


# By the name used in YAML and on the command line.
BUILTIN_REWARDS = {"think_answer_format": think_answer_format, "think_answer_correct": think_answer_correct}
