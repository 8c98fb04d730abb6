r"""Mathematical answers: finding the expression in a text, and comparing two of them. Imports no jax.

math-verify parses LaTeX and compares values, but it is too lenient about some things, which are decided here first:
which section of a text is the answer, and that relations, chains and lists of candidates do not pass for a number.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from groupax.rewards.text import Span, boxes, final_part, tagged

MAX_LENGTH = 2000  # characters of an answer; longer ones are compared only if the gold answer is about as long
TAIL = 4000  # characters at the end of a text that are searched for an answer without a box

DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+)(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\w))?|\.\d+"
# `$$...$$`, `$...$`, `\(...\)`, `\[...\]`, and a fraction outside of them.
MATH = re.compile(
    r"(?<!\\)\$\$(.{1,1000}?)(?<!\\)\$\$|(?<!\\)\$(?!\d+[^$]{0,99}\s\$\d)([^$\n]{1,1000}?)(?<!\\)\$(?!\d)"
    r"|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]|(-?\\[dt]?frac\{[^{}]{1,99}\}\{[^{}]{1,99}\})",
    re.DOTALL,
)
# Numbers, and calculations with them, outside of mathematical markup.
ARITHMETIC = re.compile(
    rf"(?<![\w.^\\])[-+−]?(?:\\?[$£€¥] ?)?[-+]?\(?(?>{DIGITS})"
    rf"(?: ?(?:[-+*/^×÷]|\*\*) ?[-+(]?(?>{DIGITS})\)?)*(?: ?\\?%)?"
)
ANSWER = re.compile(r"(?i)\banswer {0,3}(?:is\b|:|=)")
SENTENCE = re.compile(r"\n|[.!?](?=\s|$)")
MARKUP = re.compile(r"\$|\\[()\[\]]|\\text ?\{([^{}]*)\}|\\(?:quad|qquad|[,;:! ])|[\s*]+")
CONNECTIVE = re.compile(r"(?i)[,;]?(?:and|or|oraswell|as wellas)?[,;]?")

MINUS = re.compile("[−﹣－‒–]")
SPACING = re.compile(r"\\(?:[,;: ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z]))|[~\s]")
POWER_OF_TEN = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)")
MIXED = re.compile(r"(?<![\d.])(\d+) +(\d+) ?/ ?(\d+)(?![\d/])")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")
LIST_WORD = re.compile(r"\\(?:text|mathrm|textrm) ?\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")
TEXT_WITH_DIGITS = re.compile(r"\\(?:text|mathrm|textrm|textbf|mbox) ?\{([^{}]*\d[^{}]*)\}")
# Notations that may contain several candidates: adjacent numbers, alternatives, ellipses.
SEVERAL = re.compile(
    r"\d +\{?\d|\\(?:[lcd]?dots[a-z]?|lor|vee|land|wedge|mid|cup|pm|mp)(?![a-zA-Z])"
    r"|\.\.|…|\\\\|&|\||±|∨|∪|\?"
)
EXPONENT = re.compile(r"[_^] ?(?:\{[^{}]*\}|\d)")  # or index
BASE = re.compile(r"\d *_ *\{? *(\d+)")  # of a numeral, as in 11_6
SCRIPT = re.compile(r"[_^] ?\{[^{}]*\}")
RELATION = re.compile(
    r"\\(?P<command>leq?(?:slant|qq)?|geq?(?:slant|qq)?|lt|gt|ll|gg|neq?|not|approx(?:eq)?|sim|simeq|cong|equiv|doteq"
    r"|asymp|propto|in|ni|notin|subset(?:eq)?|supset(?:eq)?|to|mapsto|implies|impliedby|iff"
    r"|(?:[Ll]ong)?(?:[Ll]eft|[Rr]ight|[Ll]eftright)arrow|coloneqq)(?![a-zA-Z])"
    r"|(?P<sign><=|>=|!=|:=|==|[=<>≤≥≠≈≃≅≡∼∝∈∉→⇒⇔↦⊂⊆])"
    r"|(?P<word>(?<![a-zA-Z])(?:not|least|most|less|greater|more|fewer|than|about|approximately|around|between|except"
    r"|equals?)(?![a-zA-Z]))"
)
KINDS = {
    **dict.fromkeys(("=", "==", ":=", "coloneqq", "in", "∈", "equal", "equals"), "="),
    **dict.fromkeys(("<", ">", "lt", "gt"), "<"),
    **dict.fromkeys(("<=", ">=", "≤", "≥", "le", "leq", "leqslant", "leqq", "ge", "geq", "geqslant", "geqq"), "<="),
    **dict.fromkeys(("!=", "≠", "ne", "neq"), "!="),
}
# `x =`, `x_1 =`, `f(2) =`, `\angle ABC =`, `\overline{AB} =`, `\text{Area} =`, `x \in`
NAME = re.compile(
    r"\s*(?!\\pi(?![a-zA-Z]))(?:[a-zA-Z]{0,3}\\[a-zA-Z]+ *(?:\{[a-zA-Z ]+\}|[a-zA-Z ]*)|[a-zA-Z][a-zA-Z ]*)"
    r"(?:_(?:\w|\{[\w, ]*\}))?'*(?:(?:\\left)?\([\w ,.+-]*(?:\\right)?\))? *(?:=|\\in(?![a-zA-Z])|∈)"
)
COMMA = re.compile(r"\\.|[()\[\]{};]|(?<!\d),|,(?!\d{3}(?!\d))")  # not the one in 1,000


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
        return _listed(_runs(part, boxed)[-1])
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


def equal(answer: str, gold: str) -> bool | None:
    r"""Returns whether an answer has the value of the gold answer; None if the gold answer cannot be parsed.

    Both must be of the same kind. A gold answer without a relation is matched by an answer without one, or by the value
    of a name (`x = 5`, `f(2) = 5`, `x \in [0, 1]`). A gold relation is matched by one with the same relation signs,
    where the constant value of a name may omit the name, and an inequality may be written as an interval.

    Args:
        answer: Expression in LaTeX.
        gold: Expression in LaTeX.
    """
    from math_verify import verify

    answer, gold = _normalized(answer), _normalized(gold)
    expected = _parsed(gold)
    if not expected:
        return None
    if not answer or len(answer) > max(MAX_LENGTH, 2 * len(gold)):
        return False
    if answer == gold:
        return True
    if SEVERAL.search(answer) and not SEVERAL.search(gold):
        return False
    if not set(BASE.findall(answer)) <= set(BASE.findall(gold)):
        return False
    expected_relations, found_relations = _relations(gold), _relations(answer)
    if expected_relations != found_relations:
        if not expected_relations:
            answer = _without_names(answer)
            if _relations(answer):
                return False
        elif found_relations:
            return False
        elif set(expected_relations) == {"="}:
            gold = _without_names(gold)
            expected = _parsed(gold)
            if _relations(gold) or any(getattr(value, "free_symbols", None) for value in expected):
                return False
    values = _parsed(answer)
    if any(isinstance(value, str) and _num_digits(value) < _num_digits(answer) for value in values):
        return False  # math-verify drops what it takes for a unit, and the rest after it
    return bool(verify(expected, values, timeout_seconds=None))


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


def _normalized(latex: str) -> str:
    """Normalizes digits, minus signs, spacing, and "and" and "or" in lists."""
    latex = MINUS.sub("-", latex)
    if not latex.isascii():
        latex = re.sub(r"\d", lambda digit: str(int(digit[0])), latex)
    latex = re.sub(r"\{,\}|,\\! *", ",", latex).replace(r"\!", "")
    latex = TEXT_WITH_DIGITS.sub(r" \1 ", SPACING.sub(" ", latex))
    latex = THOUSANDS.sub(lambda number: number[0].replace(" ", ""), LIST_WORD.sub(",", latex))
    latex = POWER_OF_TEN.sub(r"\1 \\times 10^{\2}", latex)
    latex = MIXED.sub(r"\1\\frac{\2}{\3}", re.sub(r",\s*,", ",", latex).strip())
    return re.sub(r"^\$+ *|(?<!\\) *\$*[.,]* *\$*$", "", latex)


def _relations(latex: str) -> Counter[str]:
    """Counts each kind of relation outside of indices and exponents; `<` and `>` are one kind."""
    for _ in range(4):  # they may be nested
        latex = SCRIPT.sub("", latex)
    signs = (match["command"] or match["sign"] or match["word"] for match in RELATION.finditer(latex))
    return Counter(KINDS.get(sign, sign) for sign in signs)


def _num_digits(latex: str) -> int:
    return len(re.findall(r"\d", EXPONENT.sub("", latex)))


def _without_names(latex: str) -> str:
    """Returns the values in `x = 1, y = 2`: the items of a list without the names that they are the values of."""
    return ",".join(NAME.sub("", part, count=1) if NAME.match(part) else part for part in _list_items(latex))


def _list_items(latex: str) -> list[str]:
    """Splits a list at commas and semicolons outside of brackets."""
    depth, start, parts = 0, 0, []
    for token in COMMA.finditer(latex):
        depth += (token[0] in ("(", "[", "{", r"\{")) - (token[0] in (")", "]", "}", r"\}"))
        if token[0] in ",;" and depth <= 0:
            parts.append(latex[start : token.start()])
            start = token.end()
    return [*parts, latex[start:]]


def _parsed(latex: str) -> list[Any]:
    """Parses an expression with math-verify: a value and the text, or the text alone; nothing if it is not LaTeX."""
    from math_verify import LatexExtractionConfig, parse

    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", latex):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return []
    if depth or not latex:
        return []
    return parse(rf"\boxed{{{latex}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=0)
