"""Regular expressions of JSON numbers within bounds. Imports no jax."""

from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

# Numbers that every parser reads exactly, or at least without infinity.
INTEGER = "-?(?:0|[1-9][0-9]{0,15})"
NUMBER = rf"{INTEGER}(?:\.[0-9]{{1,16}})?(?:[eE][+-]?[0-9]{{1,2}})?"
_MOST_DIGITS = 16  # of a bounded number's integer part
_FRACTION = 6  # digits after those of the bounds


def integer_regex(low: Decimal | None, high: Decimal | None) -> str | None:
    """Returns the expression of the integers from `low` to `high`, both included; None for no bound, or for no integer.

    Args:
        low: Lower bound; None for none.
        high: Upper bound; None for none.
    """
    if low is None and high is None:
        return INTEGER
    widest = 10**_MOST_DIGITS - 1
    first = -widest if low is None else int(low.to_integral_value(ROUND_CEILING))
    last = widest if high is None else int(high.to_integral_value(ROUND_FLOOR))
    parts = [f"-{each}" for each in _natural_ranges(max(1, -last), -first)]
    parts += _natural_ranges(max(0, first), last)
    return one_of(parts)


def number_regex(low: Decimal | None, high: Decimal | None, above: bool, below: bool) -> str | None:
    """Returns the expression of decimal numbers within bounds, without exponents; None if there are none.

    Args:
        low: Lower bound; None for none.
        high: Upper bound; None for none.
        above: Whether the number must be above `low`.
        below: Whether the number must be below `high`.
    """
    if low is None and high is None:
        return NUMBER
    widest = Decimal(10**_MOST_DIGITS - 1)
    first, last = -widest if low is None else low, widest if high is None else high
    above, below = above and low is not None, below and high is not None
    parts = [] if last < 0 else _positive(max(first, Decimal(0)), last, above and first >= 0, below)
    if first < 0:
        parts += [f"-{each}" for each in _positive(max(-last, Decimal(0)), -first, last >= 0 or below, above)]
    return one_of(parts)


def one_of(parts: Iterable[str | None]) -> str | None:
    """Returns the expression of what any of the parts matches; None if there are no parts."""
    found = list(dict.fromkeys(part for part in parts if part is not None))
    if not found:
        return None
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def _natural_ranges(first: int, last: int) -> list[str]:
    """Returns expressions of the natural numbers from `first` to `last`."""
    parts = []
    while first <= last:
        end = min(last, 10 ** len(str(first)) - 1)
        parts += _same_length(str(first), str(end))
        first = end + 1
    return parts


def _same_length(low: str, high: str) -> list[str]:
    """Returns expressions of the digit strings from `low` to `high`, all of one length."""
    if not low:
        return [""]
    if low[0] == high[0]:
        return [low[0] + rest for rest in _same_length(low[1:], high[1:])]
    rest = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return [_digit(low[0], high[0]) + _any_digits(rest)]
    parts = [low[0] + each for each in _same_length(low[1:], "9" * rest)]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(_digit(str(int(low[0]) + 1), str(int(high[0]) - 1)) + _any_digits(rest))
    return parts + [high[0] + each for each in _same_length("0" * rest, high[1:])]


def _digit(low: str, high: str) -> str:
    return low if low == high else f"[{low}-{high}]"


def _any_digits(number: int) -> str:
    return f"[0-9]{{{number}}}" if number else ""


def _positive(low: Decimal, high: Decimal, above: bool, below: bool) -> list[str]:
    """Returns expressions of the decimal numbers from `low` to `high`, which are not negative."""
    if low > high or (low == high and (above or below)):
        return []
    (low_whole, low_part), (high_whole, high_part) = _split(low), _split(high)
    if low_whole == high_whole:
        return [f"{low_whole}{each}" for each in _fractions(low_part, high_part, above, below)]
    parts = [f"{low_whole}{each}" for each in _fractions(low_part, None, above, False)]
    parts += [f"{each}{_ANY_FRACTION}" for each in _natural_ranges(low_whole + 1, high_whole - 1)]
    return parts + [f"{high_whole}{each}" for each in _fractions("", high_part, False, below)]


_TAIL = f"[0-9]{{0,{_FRACTION}}}"
_ANY_FRACTION = rf"(?:\.[0-9]{_TAIL})?"


def _split(number: Decimal) -> tuple[int, str]:
    """Returns the whole part of a number and the digits of its fraction, without zeros at the end."""
    whole, _, part = f"{number:f}".partition(".")
    return int(whole), part.rstrip("0")


def _fractions(low: str, high: str | None, above: bool, below: bool) -> list[str]:
    """Returns expressions of the fractions from 0.LOW to 0.HIGH, with their point; of all below 1 for None."""
    if high is None and not low:
        return [rf"\.{_nonzero()}"] if above else [_ANY_FRACTION]
    parts = [rf"\.{each}" for each in _between(low, high, above, below)]
    is_zero_allowed = not low and not above and not (high == "" and below)
    return ["", *parts] if is_zero_allowed else parts


def _nonzero() -> str:
    """Returns the expression of digits that are not all zero."""
    return f"0{{0,{_FRACTION}}}[1-9]{_TAIL}"


def _between(low: str, high: str | None, above: bool, below: bool) -> list[str]:
    """Returns expressions of at least one digit, whose fraction is from 0.LOW to 0.HIGH."""
    first = low[:1] or "0"
    last = "9" if high is None else high[:1] or "0"
    if first > last:
        return []
    low_rest, high_rest = low[1:], None if high is None else high[1:]
    if first == last and high is not None:
        if not low_rest and not high_rest:  # equal bounds
            return [] if above or below else [f"{first}0{{0,{_FRACTION}}}"]
        ends = [] if low_rest or above else [first]
        return ends + [first + each for each in _between(low_rest, high_rest, above, below)]
    parts = [first + each for each in _from(low_rest, above)]
    top = int(last) if high is None else int(last) - 1
    if top > int(first):
        parts.append(_digit(str(int(first) + 1), str(top)) + _TAIL)
    if high is not None:
        parts += [last + each for each in _until(high_rest or "", below)]
    return parts


def _from(low: str, above: bool) -> list[str]:
    """Returns expressions of further digits, whose fraction is at least 0.LOW."""
    if not low:
        return [_nonzero()] if above else [_TAIL]
    parts = [low[0] + each for each in _from(low[1:], above)]
    if low[0] < "9":
        parts.append(_digit(str(int(low[0]) + 1), "9") + _TAIL)
    return parts


def _until(high: str, below: bool) -> list[str]:
    """Returns expressions of further digits, whose fraction is at most 0.HIGH."""
    if not high:
        return [] if below else [f"0{{0,{_FRACTION}}}"]
    parts = [""]
    if high[0] > "0":
        parts.append(_digit("0", str(int(high[0]) - 1)) + _TAIL)
    return parts + [high[0] + each for each in _until(high[1:], below)]
