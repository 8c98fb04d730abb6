r"""The mathematical expression that a text gives as its answer. Imports no jax."""

import re
from collections.abc import Sequence
from itertools import pairwise

from groupax.rewards.text import Span, boxes, final_part, tagged

TAIL = 4000  # characters at the end of a text that are searched for an answer without a box

DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+)(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\w))?|\.\d+"
OPERAND = rf"(?:(?>{DIGITS})(?:√(?>{DIGITS}))?|√(?>{DIGITS}))π?"
# `$$...$$`, `$...$`, `\(...\)`, `\[...\]`, and a fraction outside of them.
MATH = re.compile(
    r"(?<!\\)\$\$(.{1,1000}?)(?<!\\)\$\$|(?<!\\)\$(?!\d+[^$]{0,99}\s\$\d)((?:\\\$|[^$\n]){1,1000}?)(?<!\\)\$(?!\d)"
    r"|\\\((.{1,1000}?)\\\)|(?<!\\)\\\[(.{1,1000}?)\\\]|(-?\\[dt]?frac\{[^{}]{1,99}\}\{[^{}]{1,99}\})",
    re.DOTALL,
)
# Numbers, and calculations with them, outside of mathematical markup.
ARITHMETIC = re.compile(
    rf"(?<![\w.^\\])[-+−]?(?:\\?[$£€¥] ?)?[-+]?\(?{OPERAND}"
    rf"(?: ?(?:[-+*/^×÷]|\*\*) ?[-+(]?{OPERAND}\)?)*(?: ?\\?%)?"
)
ANSWER = re.compile(r"(?i)\banswer {0,3}(?:is\b|:|=)")
SENTENCE = re.compile(r"\n|[.!?](?=\s|$)")
MARKUP = re.compile(r"\$|\\[()\[\]]|\\text ?\{([^{}]*)\}|(?<!\\)\\(?:quad|qquad|[,;:! ])|[\s*]+")
WORDS = re.compile(r"\\text ?\{([^{}]*)\}")
CONNECTIVE = re.compile(r"(?i)[,;]?(?:and|or|oraswell|as wellas)?[,;]?")


def final_expression(text: str) -> str | None:
    r"""Returns the mathematical expression that a completion gives as its answer, or None.

    Only the text after the last `</think>` counts, and in it the last `<answer>...</answer>` if there is one. The
    answer is the last `\boxed{}`; else the text after the last "answer is" or "answer:" in that sentence; else the last
    expression in mathematical markup or the last calculation or number, whichever comes later. Expressions joined by a
    comma, "and" or "or" are one answer: a list.
    """
    part = tagged(final_part(text), "answer")
    boxed = boxes(part)
    if boxed:
        answer = _listed(_runs(part, boxed)[-1])
        return (final_expression(WORDS.sub(r"\1", answer)) or answer) if ANSWER.search(answer) else answer
    if r"\boxed" in part:  # the box was cut off
        return None
    part = part[-TAIL:]
    for stated in reversed(list(ANSWER.finditer(part))[-1:]):
        runs = _runs(part, _expressions(part, stated.end()))
        if runs and not SENTENCE.search(part, stated.end(), runs[0][0].start):
            value = runs[0]
            for run, following in pairwise(runs):
                if part[run[-1].end : following[0].start].strip() != "=":
                    break
                value = following
            return _listed(value)
    runs = _runs(part, _expressions(part))
    return _listed(runs[-1]) if runs else None


def _expressions(text: str, start: int = 0) -> list[Span]:
    """Returns the expressions in mathematical markup, and the calculations and numbers outside of it."""
    found = [Span(*match.span(), match[match.lastindex or 0]) for match in MATH.finditer(text, start)]
    gaps = zip([start, *(span.end for span in found)], [*(span.start for span in found), len(text)], strict=True)
    for first, last in list(gaps):
        found += [Span(*match.span(), _calculation(match[0])) for match in ARITHMETIC.finditer(text, first, last)]
    return sorted(found)


def _calculation(written: str) -> str:
    if written.count("(") != written.count(")"):
        written = re.sub("[()]", "", written)
    for sign, latex in {"**": "^", "×": r"\times ", "*": r"\times ", "÷": "/"}.items():
        written = written.replace(sign, latex)
    return re.sub(r"(?<!\\)([$%])", r"\\\1", written)


def _runs(text: str, spans: Sequence[Span]) -> list[list[Span]]:
    """Groups the spans that are separated only by a comma, "and" or "or"."""
    runs: list[list[Span]] = []
    for span in spans:
        between = text[runs[-1][-1].end : span.start] if runs else ""
        words = MARKUP.sub(lambda found: found[1] or "", between).replace(" ", "") if len(between) < 60 else "?"
        if runs and runs[-1][-1].end <= span.start and words and CONNECTIVE.fullmatch(words):
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def _listed(run: Sequence[Span]) -> str:
    return ", ".join(span.content for span in run)
