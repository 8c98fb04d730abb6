"""Rewards for the form of an answer. Imports no jax."""

import re
from collections.abc import Sequence
from typing import Any

from groupax.rewards.text import completion_text, tagged

THINK = re.compile(r"<think>(?!.*<think>).*?</think>.*", re.DOTALL)
# Text that is not blank and has none of the tags in it.
INNER = r"\s*(?!</?(?:think|answer)>)\S(?:(?!</?(?:think|answer)>).)*"
THINK_ANSWER = re.compile(rf"\s*<think>(?P<think>{INNER})</think>\s*<answer>(?P<answer>{INNER})</answer>\s*", re.DOTALL)
INTEGER = re.compile(r"[+-]?\d+")


def think_format(completions: Sequence[Any]) -> list[float]:
    """1 for a completion that begins with one `<think>...</think>`; else 0."""
    return [float(THINK.fullmatch(completion_text(completion)) is not None) for completion in completions]


def think_answer_format(completions: Sequence[Any]) -> list[float]:
    """1 for a completion that is `<think>...</think><answer>...</answer>`; else 0.

    Neither of them is blank, and the four tags occur once each.
    """
    return [float(THINK_ANSWER.fullmatch(completion_text(completion)) is not None) for completion in completions]


def think_answer_correct(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 for a completion in that format whose answer is exactly the column `answer`, else 0; None without such one."""
    matches = [THINK_ANSWER.fullmatch(completion_text(completion)) for completion in completions]
    return [
        None if gold is None else float(match is not None and match["answer"].strip() == str(gold).strip())
        for match, gold in zip(matches, answer, strict=True)
    ]


def xml_format(
    completions: Sequence[Any], *, tags: Sequence[str] = ("think", "answer"), strict: bool = False
) -> list[float]:
    """1 for a completion that has the tags one behind the other; else 0.

    Args:
        completions: of the policy.
        tags: in their order.
        strict: the completion is nothing but the tags, each on a line of its own, none twice. Otherwise text may stand
            around and between them.
    """
    texts = [completion_text(completion) for completion in completions]
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
    """The share of opening and closing tags that occur exactly once, less a penalty per character behind the last.

    Args:
        completions: of the policy.
        tags: expected ones.
        trailing_penalty: per character; the reward does not fall below 0.
    """
    expected = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    rewards = []
    for completion in completions:
        text = completion_text(completion)
        share = sum(text.count(mark) == 1 for mark in expected) / len(expected)
        trailing = text.rpartition(expected[-1])[2].strip() if expected[-1] in text else ""
        rewards.append(max(0.0, share - trailing_penalty * len(trailing)))
    return rewards


def integer_answer(completions: Sequence[Any]) -> list[float]:
    """1 if the last `<answer>...</answer>`, or without tags the whole completion, is an integer; else 0."""
    return [float(INTEGER.fullmatch(tagged(completion_text(c), "answer").strip()) is not None) for c in completions]


def regex_match(completions: Sequence[Any], *, pattern: str, whole: bool = True) -> list[float]:
    """1 for a completion that matches the pattern (`.` matches newlines too); else 0.

    Args:
        completions: of the policy.
        pattern: a regular expression.
        whole: the whole completion is to match, not only some part of it.
    """
    compiled = re.compile(pattern, re.DOTALL)
    find = compiled.fullmatch if whole else compiled.search
    return [float(find(completion_text(completion)) is not None) for completion in completions]


def _in_order(marks: Sequence[str], text: str) -> bool:
    """Whether the marks occur one behind the other. A pattern `a.*?b.*?c` would try each `a` with each `b`."""
    end = 0
    for mark in marks:
        start = text.find(mark, end)
        if start < 0:
            return False
        end = start + len(mark)
    return True
