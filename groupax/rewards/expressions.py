r"""Comparisons of mathematical expressions by math-verify, for `maths`. Imports no jax.

math-verify parses LaTeX and compares values. `equal` gives it both expressions in one notation and without units,
because it drops or misreads some others, and decides itself whether a relation stands for a value.
"""

import math
import re
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.sets import FiniteSet
from math_verify import LatexExtractionConfig, parse, verify
from sympy import And, Eq, Expr, I, MatrixBase, Mul, Pow, Rational, Symbol, Tuple, Union, log
from sympy import FiniteSet as SympyFiniteSet
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

MAX_LENGTH = 2000  # characters of an answer; longer ones are compared only if the gold answer is about as long
MAX_DIGITS = 10_000  # of precision
# As an answer alone: math-verify is neither to find it, nor to take a part of it for a unit.
BOXED = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="last"),
)
CHARACTERS = str.maketrans(
    dict.fromkeys("−﹣－‒–", "-")
    | {"×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "}
    | {"≈": r"\approx ", "…": r"\ldots ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset "}
    | {"∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ", "√": r"\sqrt ", "°": r"^\circ ", "²": "^2", "³": "^3"}
)
TEXT = r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it|sf)|operatorname|mbox|rm|bf) *\{"
AND_OR = r"(?:and|or)(?![a-zA-Z])"
# Spellings, in the order in which they are replaced.
NOTATION: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?|\\displaystyle(?![a-zA-Z])|(?<!\\)\\! *", ""),
        (r"(?<!\\)\\(?:[,;: ]|q?quad(?![a-zA-Z]))|[~\s]+", " "),
        (r"(?<!\\)\{ *, *\}", ","),
        (r"\\\\ *\[[^\[\]]*\]", r"\\\\"),  # space between rows
        (r"\\(begin|end) *\{(?:[bBp]|small)?matrix\*?\}", r"\\\1{pmatrix}"),
        (r"\\begin *\{cases\}([^&]*?)(?:\\\\ *)?\\end *\{cases\}", lambda rows: rows[1].replace(r"\\", ",")),
        (rf"{TEXT} *(\\pi|[eij]|[-+]?[\d.,/]+) *\}}", r" \1 "),
        (rf"{TEXT} *\\?[$£€¥] *\}}", r"\\$"),
        (rf"{TEXT} *([^{{}}a-zA-Z]*\d[^{{}}a-zA-Z]*)([a-zA-Z][^{{}}\d]*)?\}}", r" \1\\text{\2}"),
        (rf"{TEXT} *percent *\}}|(?<=\d) *percent(?![a-z])", r"\\%"),
        (rf"{TEXT} *,? *{AND_OR} *\}}|(?<![a-zA-Z\\]){AND_OR}", ","),
        (r"\\(?:text(?:rm|bf|it|normal)|mathrm|mbox) *\{", r"\\text{"),
        (r"(?<=\d) *i(?![a-zA-Z])", " i"),  # math-verify knows it as a word
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"\\([lr])angle(?![a-zA-Z])", lambda side: "(" if side[1] == "l" else ")"),
        (r"\\sqrt +(\d+|\([^()]*\))", lambda root: rf"\sqrt{{{root[1].strip('()')}}}"),
        (r"(?<![\d.,_^])\d{1,3}(?: \d{3})+(?!\d)", lambda number: number[0].replace(" ", "")),
        (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)", r"\1 \\times 10^{\2}"),
        (r"(\d*)\.(\d*)\\(?:overline|bar|dot) *\{? *(\d+) *\}?", lambda digits: _repeating(*digits.groups())),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac *(\d)", r"\\frac{\1}"),
        (r"(\\frac *\{[^{}]*\}) *(\d)", r"\1{\2}"),
        (r"(?<![\d.])(\d+) +(\d+) ?/ ?(\d+)(?![\d/])", r"\1\\frac{\2}{\3}"),
        (r"(?<![\d.^_])(\d+) *\\frac *\{ *(\d+) *\} *\{ *(\d+) *\}", lambda digits: _mixed(*map(int, digits.groups()))),
        (r"(?<![_^])([\d)]) *(?=\()", r"\1 \\cdot "),
        (r"(\d) *_ *(?:\{ *10 *\}|10(?!\d))", r"\1"),
        (r", *(?=,)", ""),
        (r"^[\s$]+|(?<!\\)[\s$.,]+$", ""),
    )
]
BRACKET = re.compile(r"[(\[]|\\\{")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)")
# What math-verify misreads: it drops ellipses and a sign of approximation, and adds adjacent numbers.
MISREAD = re.compile(
    r"(?<![_^])\d +\{?\d|(?<![_^\d.])\d+ *\\?[{\[]|(?<![a-zA-Z}\]^_])\{ *\d+ *\} *\{? *\d|\.\.|\? *\d"
    r"|\\(?:[lcdv]?dots[a-z]?|approx(?:eq)?|sim(?:eq)?|cong|doteq)(?![a-zA-Z])"
)
# Text after a value, and a word after a number, with a power, at the end of an item of a list.
UNIT = re.compile(
    r"(?:(?<=[\w})!%]) *\\text *\{ *([^{}\d]+)\}|(?<=[\d}]) *(?<!\\)(?<![a-zA-Z])([a-zA-Z]+(?: +[a-zA-Z]+)*))"
    r"(?: *\^ *\{? *(\d) *\}?)? *(?=$|[,;)\]])"
)
QUALIFIER = re.compile(
    r"(?i)\b(?:or|and|not|least|most|less|greater|more|fewer|than|about|approximately|around|between|except|equals?)\b"
)
UNITS = {
    name: (kind, factor)
    for kind, factors in {
        "length": {"mm millimeter": 1, "cm centimeter": 10, "m meter": 1000, "km kilometer": 10**6},
        "distance": {"in inch": 1, "ft foot": 12, "yd yard": 36, "mi mile": 63360},
        "time": {"s sec second": 1, "min minute": 60, "h hr hour": 3600, "day": 86400, "week": 604800},
        "mass": {"mg milligram": 1, "g gram": 1000, "kg kilogram": 10**6},
        "money": {"cent": 1, "dollar": 100},
        "morning": {"am": 1},
        "afternoon": {"pm": 1},
    }.items()
    for names, factor in factors.items()
    for name in names.split()
}
PLURALS = {"feet": "foot", "inches": "inch", "metre": "meter", "metres": "meter"}
GREEK = ("alpha", "beta", "gamma", "delta", "theta", "lambda", "sigma", "omega")
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
VARIABLE = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])")
SCRIPT = re.compile(r"[_^] ?\{[^{}]*\}")
RELATION = re.compile(r"[=<>]|\\(?:[gl]t|[gl]eq?(?:slant|q)?|neq?|not|in|notin)(?![a-zA-Z])")
BASE = re.compile(r"\d *_ *\{? *(\d+)")  # of a numeral, as in 11_6


def equal(answer: str, gold: str) -> bool | None:
    r"""Returns whether an answer has the value of the gold answer; None if the gold answer cannot be parsed.

    A gold answer without a relation is matched by a value, or by the value of a name (`x = 5`, `f(2) = 5`,
    `x \in [0, 1]`). A gold relation is matched by an equivalent one, where the constant value of a name may omit the
    name, and an inequality may be written as an interval. A unit may be omitted.
    """
    if len(answer) > max(MAX_LENGTH, 2 * len(gold)):
        return False
    gold, gold_unit = _without_unit(_normalized(gold))
    answer, unit = _without_unit(_normalized(answer), gold)
    if not gold or not _balanced(gold):
        return None
    if not answer or not _balanced(answer):
        return False
    ratio = _ratio(unit, gold_unit)
    if not ratio or not set(BASE.findall(answer)) <= set(BASE.findall(gold)):
        return False
    if re.sub(r" +(?!\w)|(?<!\w) +", "", answer) == re.sub(r" +(?!\w)|(?<!\w) +", "", gold) and ratio == 1:
        return True
    found, expected = _value(answer), _value(gold)
    if ratio != 1:
        found = found * ratio if isinstance(found, Expr) else None
    if found is None or expected is None:
        return False
    pair = _comparable(found, expected)
    if pair is None:
        return False
    small, precise = _digits(*pair)
    return bool(verify(pair[1], pair[0], float_rounding=small, numeric_precision=precise, timeout_seconds=None))


def verified(completion: str, solution: str) -> tuple[float | None, str, str]:
    r"""Compares a completion with a solution by math-verify's definitions.

    Args:
        completion: Text whose first answer in LaTeX counts, one in `\boxed{}` before others.
        solution: Text of the solution.

    Returns:
        1 or 0, or None if math-verify cannot read the solution; then how it reads the solution, and the completion.
    """
    gold = parse(solution, parsing_timeout=0)
    if not gold:
        return None, "[unparseable]", "[skipped]"
    how = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    found = parse(completion, extraction_config=[how], extraction_mode="first_match", parsing_timeout=0)
    is_right = verify(gold, found, timeout_seconds=None)
    return float(is_right), str(gold), str(found) if found else "[unparseable]"


def _normalized(latex: str) -> str:
    """Returns an expression in the notation that math-verify reads."""
    latex = latex.translate(CHARACTERS)
    if not latex.isascii():
        latex = re.sub(r"\d", lambda digit: str(int(digit[0])), latex)
    for pattern, replacement in NOTATION:
        latex = pattern.sub(replacement, latex)
    if not BRACKET.search(latex):
        latex = THOUSANDS.sub(lambda number: number[0].replace(",", ""), latex)
    return latex


def _repeating(whole: str, digits: str, repeated: str) -> str:
    """Returns the fraction that a repeating decimal is: `0.1\\overline{6}` is 15/90."""
    above = int(whole + digits + repeated) - int(whole + digits or "0")
    return rf"\frac{{{above}}}{{{(10 ** len(repeated) - 1) * 10 ** len(digits)}}}"


def _mixed(whole: int, above: int, below: int) -> str:
    """Returns a mixed number as one fraction, or a product if its fraction is improper."""
    if above >= below:
        return rf"{whole} \cdot \frac{{{above}}}{{{below}}}"
    return rf"\frac{{{whole * below + above}}}{{{below}}}"


def _without_unit(latex: str, gold: str | None = None) -> tuple[str, tuple[str, int] | None]:
    """Returns an expression without units, and the last of them if it is in `UNITS`: its name and power.

    A letter after a number is a unit of an answer only, and if the gold answer does not have it.
    """
    unit = ("dollar", 1) if r"\$" in latex else None

    def read(found: re.Match[str]) -> str:
        nonlocal unit
        text, bare, power = found.groups()
        *before, name = (text or bare).lower().replace(".", "").split() or [""]
        name = PLURALS.get(name, name if name in UNITS else name.removesuffix("s"))
        if name not in UNITS and (
            VARIABLE.search(latex, 0, found.start()) or (bare and (len(name) < 4 or name in GREEK))
        ):
            return found[0]
        if QUALIFIER.search(text or bare) or (bare and len(bare) == 1 and (gold is None or name in gold)):
            return found[0]
        if name in UNITS and len(before) < 2:
            unit = name, int(power or POWERS.get("".join(before), 1))
        return ""

    latex = UNIT.sub(read, latex.replace(r"\$", ""))
    return latex.strip(), unit


def _ratio(unit: tuple[str, int] | None, gold_unit: tuple[str, int] | None) -> Any:
    """Returns the factor from one unit to the other, 1 if one of them is omitted; 0 if they measure other things."""
    if unit is None or gold_unit is None:
        return 1
    (kind, factor), (gold_kind, gold_factor) = UNITS[unit[0]], UNITS[gold_unit[0]]
    return Rational(factor, gold_factor) ** unit[1] if (kind, unit[1]) == (gold_kind, gold_unit[1]) else 0


def _balanced(latex: str) -> bool:
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", latex):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return not depth


def _value(latex: str) -> Any:
    """Parses an expression with math-verify; None if that cannot read all of it."""
    parsed = parse(rf"\boxed{{{latex}}}", [BOXED], parsing_timeout=0)
    if MISREAD.search(latex) or len(parsed) < 2:
        return None
    for _ in range(4):  # scripts may be nested
        latex = SCRIPT.sub("", latex)
    if RELATION.search(latex) and not _is_relation(parsed[0]):  # it drops signs, and tries the end of a chain
        return None
    unit = Symbol("i", real=False)
    return parsed[0].subs(unit, I) if unit in getattr(parsed[0], "free_symbols", ()) else parsed[0]


def _comparable(found: Any, expected: Any) -> tuple[Any, Any] | None:
    """Returns what to compare of an answer and the gold answer; None if one is a relation that is not for a value."""
    (name, value), (gold_name, gold_value) = _named(found), _named(expected)
    if not _is_relation(found):
        if not _is_relation(expected):
            return found, expected
        if gold_name and (isinstance(gold_name, AppliedUndef) or not gold_value.free_symbols):
            return found, gold_value
        _, gold_set = _solutions(expected)
        return None if gold_set is None else (found, gold_set)
    if not _is_relation(expected):
        if name:
            return value, expected
        _, solutions = _solutions(found)
        return None if solutions is None else (solutions, expected)
    if name and name == gold_name:
        return value, gold_value
    (symbol, solutions), (gold_symbol, gold_set) = _solutions(found), _solutions(expected)
    if solutions is not None and gold_set is not None:
        return (solutions, gold_set) if symbol == gold_symbol else None
    return found, expected


def _items(value: Any) -> list[Any]:
    """Returns the elements of a list in the order in which they are written, or the value alone."""
    return list(getattr(value, "_unsorted_args", value.args)) if isinstance(value, SympyFiniteSet) else [value]


def _is_relation(value: Any) -> bool:
    return any(isinstance(item, (Relational, And)) for item in _items(value))


def _named(value: Any) -> tuple[Any, Any]:
    """Returns the name and the value in `x = 1`, the names and values in a list of these; no name for anything else."""
    names, values = [], []
    for item in _items(value):
        if not isinstance(item, Eq):
            return None, value
        name, *constants = sorted(item.args, key=lambda side: not _is_name(side))
        if not _is_name(name):
            return None, value
        names.append(name)
        values += _items(constants[0])
    if len(set(names)) > 1:
        return tuple(names), Tuple(*values)
    return names[0], values[0] if len(values) == 1 else FiniteSet(*values)


def _is_name(side: Any) -> bool:
    """Returns whether this is a name: `x`, `f(2)`, `(x, y)`, `ABC`, or a quotient of such names."""
    if isinstance(side, Pow):
        return side.exp == -1 and _is_name(side.base)
    return isinstance(side, (Symbol, AppliedUndef)) or (
        isinstance(side, (Mul, Tuple)) and all(_is_name(part) for part in side.args)
    )


def _solutions(value: Any) -> tuple[Any, Any]:
    """Returns the symbol and the set of its values in inequalities of one symbol, or None for both."""
    symbols = value.free_symbols
    items = _items(value)
    if len(symbols) != 1 or not all(isinstance(item, (Relational, And)) and not item.has(Eq) for item in items):
        return None, None
    try:
        return symbols.pop(), Union(*(item.as_set() for item in items))
    except (NotImplementedError, TypeError, ValueError):
        return None, None


def _digits(*values: Any) -> tuple[int, int]:
    """Returns the decimals and the digits that tell these values from others of their size."""
    small = large = 0
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, MatrixBase):
            pending += list(value.flat())
        elif not getattr(value, "is_number", False):
            pending += getattr(value, "args", ())
        elif value.is_finite and not value.is_zero:
            magnitude = log(abs(value), 10).evalf(5)
            if magnitude.is_Float:
                exponent = float(magnitude)
                small, large = min(small, math.floor(exponent)), max(large, math.ceil(abs(exponent)))
    return min(max(6, 3 - small), MAX_DIGITS), min(15 + large, MAX_DIGITS)
