"""The rewards of `trl.rewards` that verify answers, with its definitions, in a process of their own. Imports no jax.

They score the first message of a completion. The other rewards are those of the installed TRL.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from groupax.rewards.maths import Comparer

Rewards = list[float | None]
LogExtra = Callable[[str, Sequence[Any]], None]
TOO_LONG = "[takes too long]"

_VERIFY = Comparer("groupax.rewards.expressions:verified")


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: LogExtra | None = None, **_: Any
) -> Rewards:
    """Returns 1 if math-verify finds the answer of a completion equal to the solution, else 0; None without one.

    Raises:
        ImportError: math-verify is not installed.
    """
    return _verified([_first_text(completion) for completion in completions], solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **_: Any,
) -> Rewards:
    """Returns the accuracy of what follows the reasoning; 0 for a completion whose reasoning does not end.

    Args:
        reasoning_delimiters: Texts that end the reasoning, `</think>` by default; the first one that occurs counts.
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    answers: list[str | None] = []
    for completion in completions:
        text = _first_text(completion)
        delimiter = next((each for each in delimiters if each in text), None)
        answers.append(None if delimiter is None else text.rpartition(delimiter)[2])
    return _verified(answers, solution, log_extra)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., Rewards]:
    """Returns a reward that scales accuracy by length along half a cosine, up to `max_len` tokens.

    A wrong completion has the smallest of its rewards without tokens, and a correct one the largest.

    Source: arXiv:2502.03373, appendix C.1.
    """

    def cosine_scaled_reward(
        completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> Rewards:
        rewards: Rewards = []
        for correct, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True):
            if correct is None:
                rewards.append(None)
                continue
            start, end = (max_value_correct, min_value_correct) if correct else (min_value_wrong, max_value_wrong)
            progress = min(1.0, len(ids) / max_len)
            rewards.append(end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * progress)))
        return rewards

    return cosine_scaled_reward


def __getattr__(name: str) -> Any:
    """Returns a reward that needs no protection from answers that take long: that of the installed TRL."""
    return getattr(importlib.import_module("trl.rewards"), name)


def _verified(answers: Sequence[str | None], solution: Sequence[str], log_extra: LogExtra | None) -> Rewards:
    """Returns the accuracy of answers, None for one that is missing, and logs how both sides were read."""
    rewards: Rewards = []
    golds, found = [], []
    for answer, gold in zip(answers, solution, strict=True):
        if answer is None:
            verdict: tuple[float | None, str, str] = (0.0, "[incomplete reasoning]", "[incomplete reasoning]")
        else:
            verdict = _VERIFY(answer, gold) or (0.0, TOO_LONG, TOO_LONG)
        rewards.append(verdict[0])
        golds.append(verdict[1])
        found.append(verdict[2])
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", golds)
        log_extra("answer_parsed", found)
    return rewards


def _first_text(completion: Any) -> str:
    """Returns the text of a completion, or of its first message."""
    return completion if isinstance(completion, str) else completion[0].get("content") or ""
