"""The rewards of `trl.rewards`, with its definitions. Imports no jax.

They score the first message of a completion.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from groupax.rewards.formats import THINK
from groupax.rewards.maths import Comparer

Rewards = list[float | None]
LogExtra = Callable[[str, Sequence[Any]], None]
TOO_LONG = "[takes too long]"

_VERIFY = Comparer("groupax.rewards.expressions:verified")


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: LogExtra | None = None, **_: Any
) -> Rewards:
    """Returns 1 if math-verify finds the answer of a completion equal to the solution, else 0.

    Args:
        completions: Completions of the policy.
        solution: Solutions; where math-verify cannot read one, the reward is None.
        log_extra: Function that logs a column; given by the trainer.

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
        completions: Completions of the policy.
        solution: Solutions, as `accuracy_reward` takes them.
        reasoning_delimiters: Texts that end the reasoning, `</think>` by default; the first one that occurs counts.
        log_extra: Function that logs a column; given by the trainer.

    Raises:
        ImportError: math-verify is not installed.
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

    Args:
        max_len: Length in tokens at which the curve ends.
        min_value_wrong: Reward of a wrong completion without tokens.
        max_value_wrong: Reward of a wrong completion of `max_len` tokens.
        min_value_correct: Reward of a correct completion of `max_len` tokens.
        max_value_correct: Reward of a correct completion without tokens.

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


def think_format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Returns 1 for a completion that starts with exactly one `<think>...</think>`, else 0."""
    return [float(THINK.fullmatch(_first_text(completion)) is not None) for completion in completions]


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """Returns a reward that is `max_penalty` times the fraction of n-grams of tokens that are repetitions.

    Args:
        ngram_size: Number of tokens in an n-gram; shorter completions get 0.
        max_penalty: Penalty if all n-grams are repetitions.

    Raises:
        ValueError: The penalty is above 0.

    Source: arXiv:2502.03373, appendix C.2.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty must be at most 0, got {max_penalty}")

    def repetition_penalty_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        rewards = []
        for ids in completion_ids:
            ngrams = [tuple(ids[start : start + ngram_size]) for start in range(len(ids) - ngram_size + 1)]
            repeated = 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
            rewards.append(repeated * max_penalty if repeated else 0.0)
        return rewards

    return repetition_penalty_reward


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Returns a reward that is 0 for short completions, and falls to -1 over the last tokens before the maximum.

    Args:
        max_completion_len: Length in tokens from which the reward is -1.
        soft_punish_cache: Number of tokens over which the penalty grows; with 0 it is -1 beyond the maximum alone.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    free = max_completion_len - soft_punish_cache

    def soft_overlong_punishment_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        rewards = []
        for length in map(len, completion_ids):
            if length <= free:
                rewards.append(0.0)
            else:
                rewards.append((free - length) / soft_punish_cache if length <= max_completion_len else -1.0)
        return rewards

    return soft_overlong_punishment_reward


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
