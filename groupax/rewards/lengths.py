"""Rewards for the length of a completion, in tokens, and against repetition. Imports no jax.

The length of an episode of several turns is the number of tokens that the model sampled.
"""

import re
from collections.abc import Sequence
from typing import Any

from groupax.rewards.text import completion_text

# Thai to Khmer, East Asian scripts but for Hangul, and pictures.
WITHOUT_SPACES = re.compile(
    r"[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2600-\u27bf\u2e80-\u9fff\uf900-\ufaff\U0001f000-\U0003ffff]"
)


def soft_overlong(
    completion_ids: Sequence[Sequence[int]],
    *,
    max_length: int,
    buffer: int,
    completion_mask: Sequence[Sequence[bool]] | None = None,
) -> list[float]:
    """Returns 0 up to `max_length - buffer` tokens, falling linearly to -1 at `max_length`, and -1 beyond.

    Args:
        completion_ids: Token ids of each completion.
        max_length: Length in tokens from which the reward is -1.
        buffer: Number of tokens over which the penalty grows.
        completion_mask: Tokens that count; None for all.

    Raises:
        ValueError: The buffer is not between 1 and `max_length`.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"soft_overlong needs a buffer from 1 to max_length = {max_length}, got {buffer}")
    free = max_length - buffer
    lengths = [len(ids) for ids in completion_ids]
    if completion_mask is not None:
        lengths = [sum(map(bool, mask)) for mask in completion_mask]
    return [-min(1.0, max(0.0, (length - free) / buffer)) for length in lengths]


def repetition_penalty(completions: Sequence[Any], *, ngram: int = 3, max_penalty: float = -1.0) -> list[float]:
    """Returns `max_penalty` times the fraction of word n-grams that occurred before.

    A word of a script without spaces (Chinese, Thai), or of more than 20 characters, counts as its overlapping pieces
    of three characters.

    Args:
        completions: Completions of the policy.
        ngram: Number of words in an n-gram; shorter completions get 0.
        max_penalty: Penalty if all n-grams are repetitions; at most 0.

    Raises:
        ValueError: The penalty is above 0, or n is below 1.

    Source: arXiv:2502.03373, appendix C.2, with one penalty for the whole completion.
    """
    if max_penalty > 0 or ngram < 1:
        raise ValueError(f"repetition_penalty needs max_penalty <= 0 and ngram >= 1, got {max_penalty} and {ngram}")
    rewards = []
    for completion in completions:
        words = [part for word in completion_text(completion).lower().split() for part in _parts(word)]
        grams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
        rewards.append(max_penalty * (1.0 - len(set(grams)) / len(grams)) if grams else 0.0)
    return rewards


def _parts(word: str) -> list[str]:
    if len(word) > 20 or WITHOUT_SPACES.search(word):
        return [word[start : start + 3] for start in range(max(1, len(word) - 2))]
    return [word]
