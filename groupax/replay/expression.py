"""Conditions on metrics, as texts: 'kl > 1', 'grad_norm > 10 or loss is nan'. They are parsed, never evaluated.

condition = part { "or" part }        part = term { "and" term }        term = METRIC ("<" | "<=" | ...) NUMBER
                                                                             | METRIC "is" "nan"
Imports no jax.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_TERM = re.compile(r"\s*([\w/.@-]+?)\s*(<=|>=|==|!=|<|>)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*")
_NAN = re.compile(r"\s*([\w/.@-]+)\s+is\s+nan\s*")


@dataclass(frozen=True)
class Term:
    """A comparison of a metric with a number; without a comparison, the metric must not be finite."""

    metric: str
    comparison: str = ""
    number: float = 0.0

    def holds(self, metrics: Mapping[str, Any]) -> bool:
        """Returns whether a line of metrics fulfils it; one without the metric does not."""
        if self.metric not in metrics:
            return False
        value = metrics[self.metric]
        if not self.comparison or value is None:
            return not self.comparison and value is None
        return COMPARISONS[self.comparison](value, self.number)


@dataclass(frozen=True)
class Condition:
    """Terms of which all of one of the parts must hold; as a string, the text that it was."""

    text: str
    parts: tuple[tuple[Term, ...], ...]

    def __str__(self) -> str:
        return self.text

    def holds(self, metrics: Mapping[str, Any]) -> bool:
        """Returns whether a line of metrics fulfils the condition."""
        return any(all(term.holds(metrics) for term in part) for part in self.parts)

    def deciding(self, metrics: Mapping[str, Any], before: Mapping[str, Any]) -> str:
        """Returns the metric by which a line fulfils the condition, and another line does not.

        Args:
            metrics: A line that fulfils it.
            before: The other line; empty if there is none.
        """
        part = next(part for part in self.parts if all(term.holds(metrics) for term in part))
        return next((term.metric for term in part if not term.holds(before)), part[0].metric)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(dict.fromkeys(term.metric for part in self.parts for term in part))


def parsed_condition(text: str) -> Condition:
    """Returns the condition that a text describes.

    Raises:
        ValueError: It describes none.
    """
    parts = [re.split(r"\s+and\s+", part) for part in re.split(r"\s+or\s+", text)]
    return Condition(text.strip(), tuple(tuple(_term(term, text) for term in part) for part in parts))


def _term(term: str, text: str) -> Term:
    if found := _TERM.fullmatch(term):
        try:
            return Term(found[1], found[2], float(found[3]))
        except ValueError:
            pass
    if found := _NAN.fullmatch(term):
        return Term(found[1])
    raise ValueError(
        f"{text!r} is no condition on metrics: {term.strip()!r} must be like 'kl > 1' or 'loss is nan', and 'and' and "
        "'or' join several"
    )
