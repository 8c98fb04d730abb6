"""TRL's `accuracy_reward` in a process of its own, in which an answer that takes too long is wrong. Imports no jax.

The other rewards are those of the installed TRL.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from groupax.rewards.maths import Comparer

TOO_LONG = "[takes too long]"

_VERIFY = Comparer("groupax.rewards.expressions:verified")


def accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    log_extra: Callable[[str, Sequence[Any]], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Returns 1 if math-verify finds the answer of a completion equal to the solution, else 0; None without one.

    Raises:
        ImportError: math-verify is not installed.
    """
    texts = [each if isinstance(each, str) else each[0].get("content") or "" for each in completions]
    verdicts = [_VERIFY(text, gold) or (0.0, TOO_LONG, TOO_LONG) for text, gold in zip(texts, solution, strict=True)]
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [gold for _, gold, _ in verdicts])
        log_extra("answer_parsed", [answer for _, _, answer in verdicts])
    return [reward for reward, _, _ in verdicts]


def __getattr__(name: str) -> Any:
    """Returns another reward of the installed TRL."""
    return getattr(importlib.import_module("trl.rewards"), name)
