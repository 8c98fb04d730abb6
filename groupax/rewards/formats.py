"""Rewards for the format of a completion. Imports no jax.

A completion that closes its thinking before it opens it begins within it, as `text.with_thinking` says.
"""

import re
from collections.abc import Sequence
from typing import Any

from groupax.rewards.text import completion_text, tagged, with_thinking

THINK = re.compile(r"<think>(?!.*<think>).*?</think>.*", re.DOTALL)
# Text that is not blank and contains none of the tags.
INNER = r"\s*(?!</?(?:think|answer)>)\S(?:(?!</?(?:think|answer)>).)*"
THINK_ANSWER = re.compile(rf"\s*<think>(?P<think>{INNER})</think>\s*<answer>(?P<answer>{INNER})</answer>\s*", re.DOTALL)
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


def _in_order(marks: Sequence[str], text: str) -> bool:
    """Returns whether the marks occur in this order. A pattern `a.*?b.*?c` would take quadratic time."""
    end = 0
    for mark in marks:
        start = text.find(mark, end)
        if start < 0:
            return False
        end = start + len(mark)
    return True
