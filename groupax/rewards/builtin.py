"""Rewards by name. Imports no jax."""

import re
from collections.abc import Sequence
from typing import Any

from groupax.rewards.text import completion_text

THINK_ANSWER = re.compile(r"\s*<think>(?P<think>.+?)</think>\s*<answer>(?P<answer>.+?)</answer>\s*", re.DOTALL)


def think_answer_format(completions: Sequence[Any]) -> list[float]:
    """1 for a completion that is `<think>...</think><answer>...</answer>`, neither of them empty; else 0."""
    return [float(THINK_ANSWER.fullmatch(completion_text(completion)) is not None) for completion in completions]


def answer_correct(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    """1 for a completion whose last `<answer>...</answer>` holds exactly the column `answer`; else 0."""
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        given = re.findall(r"<answer>(.*?)</answer>", completion_text(completion), re.DOTALL)
        rewards.append(float(bool(given) and given[-1].strip() == str(gold).strip()))
    return rewards


# By the name used in YAML and on the command line.
BUILTIN_REWARDS = {"think_answer_format": think_answer_format, "answer_correct": answer_correct}
