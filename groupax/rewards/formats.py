"""Rewards for the format of a completion, for its length in tokens, and against repetition. Imports no jax.

A completion that closes its thinking before it opens it begins within it, as `text.with_thinking` says. The
length of an episode of several turns is the number of tokens that the model sampled.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from groupax.rewards.maths import math_accuracy
from groupax.rewards.text import completion_text, tagged, with_thinking

THINK = re.compile(r"<think>(?!.*<think>).*?</think>.*", re.DOTALL)
# Text that is not blank and contains none of the tags.
INNER = r"\s*(?!</?(?:think|answer)>)\S(?:(?!</?(?:think|answer)>).)*"
THINK_ANSWER = re.compile(rf"\s*<think>(?P<think>{INNER})</think>\s*<answer>(?P<answer>{INNER})</answer>\s*", re.DOTALL)
# Thai to Khmer, East Asian scripts but for Hangul, and pictures.
WITHOUT_SPACES = re.compile(
    r"[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2600-\u27bf\u2e80-\u9fff\uf900-\ufaff\U0001f000-\U0003ffff]"
)
INTEGER = re.compile(r"[+-]?\d+")


def think_format(completions: Sequence[Any]) -> list[float]:
    """Returns 1 for a completion that starts with exactly one `<think>...</think>`, else 0."""
    return [
        float(THINK.fullmatch(with_thinking(completion_text(completion))) is not None) for completion in completions
    ]


def think_answer_format(completions: Sequence[Any]) -> list[float]:
    """Returns 1 for a completion of the form `<think>...</think><answer>...</answer>`, else 0.

    Neither section may be blank, and each of the four tags must occur once.
    """
    return [
        float(THINK_ANSWER.fullmatch(with_thinking(completion_text(completion))) is not None)
        for completion in completions
    ]


def think_answer_correct(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """Returns 1 for a completion in that format whose answer equals `answer`, else 0; None if that is None."""
    matches = [THINK_ANSWER.fullmatch(with_thinking(completion_text(completion))) for completion in completions]
    return [
        None if gold is None else float(match is not None and match["answer"].strip() == str(gold).strip())
        for match, gold in zip(matches, answer, strict=True)
    ]


def xml_format(
    completions: Sequence[Any], *, tags: Sequence[str] = ("think", "answer"), strict: bool = False
) -> list[float]:
    """Returns 1 for a completion that has the tags in this order, else 0.

    Args:
        completions: Completions of the policy.
        tags: Names of the tags.
        strict: Whether the completion must consist of the tags alone, each on its own line and none repeated. Otherwise
            other text is allowed around and between them.
    """
    texts = [with_thinking(completion_text(completion), tags[0]) for completion in completions]
    if not strict:
        marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
        return [float(_in_order(marks, text)) for text in texts]
    names = [re.escape(tag) for tag in tags]
    inner = rf"(?:(?!</?(?:{'|'.join(names)})>).)*"
    pattern = re.compile(r"\n".join(rf"<{name}>\n{inner}\n</{name}>" for name in names) + r"\n?", re.DOTALL)
    return [float(pattern.fullmatch(text) is not None) for text in texts]


def xml_count(
    completions: Sequence[Any], *, tags: Sequence[str] = ("think", "answer"), trailing_penalty: float = 0.001
) -> list[float]:
    """Returns the fraction of opening and closing tags that occur exactly once, minus a penalty per trailing character.

    Args:
        completions: Completions of the policy.
        tags: Names of the expected tags.
        trailing_penalty: Penalty per character after the last tag; the reward is at least 0.
    """
    expected = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    rewards = []
    for completion in completions:
        text = with_thinking(completion_text(completion), tags[0])
        share = sum(text.count(mark) == 1 for mark in expected) / len(expected)
        trailing = text.rpartition(expected[-1])[2].strip() if expected[-1] in text else ""
        rewards.append(max(0.0, share - trailing_penalty * len(trailing)))
    return rewards


def integer_answer(completions: Sequence[Any]) -> list[float]:
    """Returns 1 if the last `<answer>...</answer>`, or without tags the whole completion, is an integer, else 0."""
    return [float(INTEGER.fullmatch(tagged(completion_text(c), "answer").strip()) is not None) for c in completions]


def regex_match(completions: Sequence[Any], *, pattern: str, whole: bool = True) -> list[float]:
    """Returns 1 for a completion that matches the pattern (`.` also matches newlines), else 0.

    Args:
        completions: Completions of the policy.
        pattern: Regular expression.
        whole: Whether the whole completion must match, instead of any substring.
    """
    compiled = re.compile(pattern, re.DOTALL)
    find = compiled.fullmatch if whole else compiled.search
    return [float(find(completion_text(completion)) is not None) for completion in completions]


def _in_order(marks: Sequence[str], text: str) -> bool:
    """Returns whether the marks occur in this order. A pattern `a.*?b.*?c` would take quadratic time."""
    end = 0
    for mark in marks:
        start = text.find(mark, end)
        if start < 0:
            return False
        end = start + len(mark)
    return True


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
    return [-min(1.0, max(0.0, (length - free) / buffer)) for length in _lengths(completion_ids, completion_mask)]


def cosine_length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[Any],
    *,
    max_length: int,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    completion_mask: Sequence[Sequence[bool]] | None = None,
) -> list[float | None]:
    """Scales accuracy by length along half a cosine: short right answers are best, short wrong ones worst.

    Args:
        completions: Completions of the policy.
        completion_ids: Their token ids.
        answer: Gold answers, compared by `math_accuracy`.
        max_length: Length in tokens at which the curve ends.
        right: Rewards of a right completion of 0 and of `max_length` tokens.
        wrong: Rewards of a wrong completion of 0 and of `max_length` tokens.
        completion_mask: Tokens that count; None for all.

    Returns:
        A reward per completion; None where the gold answer cannot be parsed.

    Source: arXiv:2502.03373, section 4.2.
    """
    rewards: list[float | None] = []
    lengths = _lengths(completion_ids, completion_mask)
    for length, accuracy in zip(lengths, math_accuracy(completions, answer), strict=True):
        if accuracy is None:
            rewards.append(None)
            continue
        start, end = right if accuracy == 1.0 else wrong
        progress = min(1.0, length / max_length)
        rewards.append(end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * progress)))
    return rewards


def _lengths(ids: Sequence[Sequence[int]], mask: Sequence[Sequence[bool]] | None) -> list[int]:
    return [len(each) for each in ids] if mask is None else [sum(map(bool, each)) for each in mask]


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
