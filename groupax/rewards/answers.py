r"""The answer that a text gives: its final number, as an exact fraction, or its final expression. Imports no jax."""

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from groupax.rewards.text import Span, boxes, final_part, tagged

ANSWER = re.compile(r"(?i)\banswer {0,3}(?:is\b|:|=)")
SENTENCE = re.compile(r"\n|[.!?](?=\s|$)")

# -- numbers

MAX_LENGTH = 400  # characters of one number; exact arithmetic on longer ones is slow, and none of them is an answer

# Notations of LaTeX and Unicode that are normalized; the order matters.
SPACING = re.compile(r"\{,\}|\\[,!]")  # inside a number: 1{,}000, 1\,000, 1,\!000
ESCAPED = re.compile(r"\\([$%])|\\[ ;:]|[~\u00a0\u2009\u202f]")
MINUS = re.compile(r"[−﹣－]|(?<![\w)])[‒–](?=[$\d.\\])")  # a dash is a minus sign only where it is not a range
VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5"}
VULGAR |= {"⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?!\d)")
DIGITS = r"(?:\d+(?:\.\d+)?|\.\d+)"
LATEX_FRACTION = re.compile(rf"\\[dt]?frac *(?:\{{ *([-+]?{DIGITS}) *\}} *\{{ *({DIGITS}) *\}}|(\d) ?(\d))")

NUMBER = re.compile(
    # exponents and indices are not separate values: 18 cm^2 is 18
    r"(?:(?<!\d)|(?=[-+]))(?<![\^_])(?<![\^_][{+-])(?<![\^_]\{[-+])"
    r"(?P<sign>[-+]?)(?:[$£€¥] *)?(?P<inner_sign>[-+]?)"
    r"(?:(?P<whole>\d+) {1,2}(?=\d+/\d))?"
    rf"(?>(?P<value>{DIGITS})(?:[eE](?P<e>[-+]?\d{{1,3}})(?!\w)"
    r"| {0,2}(?:\\times|\\cdot|[×*]) {0,2}10 ?\^ ?\{?(?P<power>[-+]?\d{1,3})\}?"
    r"| ?\^ ?\{?(?P<exponent>\d{1,2})(?!\d)\}?)?)"
    rf"(?:(?P<slash> ?/ ?)(?>(?P<below>{DIGITS}))(?! ?/))?"
)
# Before another number, `5 or 6`, `5, 6` and `5 6`: no single answer.
ALTERNATIVE = re.compile(r"(?:,[ \t]*|[ \t]+)(?P<word>(?:or|and)[ \t]+)?(?=[$-]?\d)")
MARK = re.compile(r"####[ \t]*")
NUMBERING = re.compile(r"[.):][ \t]+\S")  # after the number of a heading: `#### 3. Add up`
_BETWEEN = re.compile(r"(?:[-+*/×÷=()$\s]|\\times|\\div|\\cdot)*")
PARENTHESIS = re.compile(r"(?<!\\)\([^()\n]*\)")


class Number(NamedTuple):
    """A number in a text, from `start` up to `end`."""

    start: int
    end: int
    value: Fraction


def final_number(text: str) -> Fraction | None:
    r"""Returns the number that a completion gives as its answer, or None.

    Only the text after the last `</think>` counts. The answer is the number directly after the last `####` that has
    one; else, within the last `<answer>...</answer>` if there is one, the last number in the last `\boxed{}`; else the
    number after the last "answer is" or "answer:"; else the last number, ignoring parentheses in its line if there is
    a number outside of them.
    """
    text = plain(final_part(text))
    is_marked, marked = _marked(text)
    if is_marked:
        return marked
    answer = tagged(text, "answer")
    boxed = boxes(answer)
    if boxed:
        return _last(boxed[-1].content)
    is_stated, stated = _stated(answer)
    return stated if is_stated else _last_outside_asides(answer)


def number_text(number: Fraction) -> str:
    """Returns a number in decimal digits where they are exact, else as a fraction."""
    rest = number.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest > 1 or number.denominator > 10**12 or abs(number.numerator) > 10**24:
        return str(number)
    return format((Decimal(number.numerator) / Decimal(number.denominator)).normalize(), "f")


def plain(text: str) -> str:
    """Returns the text with its numbers in one notation: `-1000`, ` 1/2`, `$5`, `50%`."""
    text = SPACING.sub("", text)
    text = ESCAPED.sub(lambda found: found[1] or " ", text)
    text = MINUS.sub("-", text)
    if not text.isascii():
        text = re.sub("|".join(VULGAR), lambda found: f" {VULGAR[found[0]]}", text)
    text = THOUSANDS.sub(lambda found: re.sub("[, ]", "", found[0]), text)
    return LATEX_FRACTION.sub(_slashed, text)


def numbers(text: str) -> list[Number]:
    """Returns the numbers in a `plain` text."""
    found = []
    for match in NUMBER.finditer(text):
        value = _value(match)
        if value is not None:
            found.append(Number(match.start(), match.end(), value))
    return found


def _slashed(fraction: re.Match[str]) -> str:
    after_digit = fraction.start() > 0 and fraction.string[fraction.start() - 1].isdigit()  # 2\frac{1}{2} is mixed
    return f"{' ' * after_digit}{fraction[1] or fraction[3]}/{fraction[2] or fraction[4]}"


def _value(number: re.Match[str]) -> Fraction | None:
    if len(number[0]) > MAX_LENGTH:
        return None
    value = Fraction(number["value"]) * Fraction(10) ** int(number["e"] or number["power"] or 0)
    if number["exponent"]:
        value **= int(number["exponent"])
    if number["below"]:
        below = Fraction(number["below"])
        if not below:
            return None
        value /= below
        if number["whole"] and value < 1:
            value += int(number["whole"])
    return -value if "-" in (number["sign"], number["inner_sign"]) else value


def _last(text: str) -> Fraction | None:
    found = numbers(text)
    return found[-1].value if found else None


def _marked(text: str) -> tuple[bool, Fraction | None]:
    """Returns whether there is a number directly after a `####`, and the last such; None for one of several."""
    last: tuple[bool, Fraction | None] = False, None
    for mark in MARK.finditer(text):
        number = NUMBER.match(text, mark.end())
        if number and not NUMBERING.match(text, number.end()) and (value := _value(number)) is not None:
            last = True, None if ALTERNATIVE.match(text, number.end()) else value
    return last


def _stated(text: str) -> tuple[bool, Fraction | None]:
    """Returns whether the sentence of the last "answer is" has a number, and the first, or a calculation's result.

    The number is None if it is one of several, joined by "or" or "and".
    """
    stated = list(ANSWER.finditer(text))
    if not stated:
        return False, None
    start = stated[-1].end()
    end = SENTENCE.search(text, start)
    sentence = text[start : end.start() if end else len(text)]
    found = numbers(sentence)
    if not found:
        return False, None
    value = found[0].value
    for one, other in pairwise(found):
        between = sentence[one.end : other.start]
        if (joined := ALTERNATIVE.match(sentence, one.end)) and joined["word"]:
            return True, None
        if not _BETWEEN.fullmatch(between):
            break
        if "=" in between:
            value = other.value
    return True, value


def _last_outside_asides(text: str) -> Fraction | None:
    found = numbers(text)
    if not found:
        return None
    line = text[text.rfind("\n", 0, found[-1].start) + 1 :]
    for _ in range(3):  # they may be nested
        line = PARENTHESIS.sub("", line)
    # `18 (see note 3)` is 18, but `eighteen (18)` is the number in parentheses
    outside = _last(line)
    return found[-1].value if outside is None else outside


# -- expressions

TAIL = 4000  # characters at the end of a text that are searched for an answer without a box

GROUPED_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+)(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\w))?|\.\d+"
OPERAND = rf"(?:(?>{GROUPED_DIGITS})(?:√(?>{GROUPED_DIGITS}))?|√(?>{GROUPED_DIGITS}))π?"
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
