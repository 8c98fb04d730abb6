"""Paired comparison of two evaluations on the same items. Imports no jax."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from groupax.rollouts.estimates import STUDENT, Estimate, Z, mean_value

BONETT_PRICE = "bonett-price"  # see `paired_difference`
MCNEMAR = "mcnemar, exact"
LEVEL = 0.05  # of tests
SMALLEST_P = 1e-99  # that is shown


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference, after minus before, over the items of both evaluations."""

    before: float  # mean before over these items
    after: float  # mean after over these items
    difference: Estimate  # difference of the means with its interval
    # probability of a difference at least as large under the null hypothesis; NaN with fewer than 2 items
    p_value: float
    test: str  # name of the statistical test
    num_gained: int  # number of items whose value rose
    num_lost: int  # number of items whose value fell

    @property
    def is_clear(self) -> bool:
        """Returns whether both the interval and the test tell it from 0, which near 5 % they may do differently."""
        return (self.difference.low > 0 or self.difference.high < 0) and self.p_value < LEVEL


def paired_difference(before: Sequence[float] | np.ndarray, after: Sequence[float] | np.ndarray) -> PairedDifference:
    """Estimates the mean difference over items, with an interval and a p-value.

    If all values are 0 or 1, the interval is Wald's over (gained + 1) / (N + 2) and (lost + 1) / (N + 2), and the
    p-value is the exact one of McNemar's test: the changed items would improve or worsen with equal probability.
    Otherwise both are Student's, over the items' differences.

    Args:
        before: [N] values of the items before.
        after: [N] values of the same items, in the same order, after.

    Raises:
        ValueError: The lengths differ.

    Source: Bonett and Price, J. Educational and Behavioral Statistics 37 (2012); McNemar, Psychometrika 12 (1947).
    """
    if len(before) != len(after):
        raise ValueError(f"a paired comparison needs the same items, got {len(before)} and {len(after)}")
    first, second = np.asarray(before, np.float64), np.asarray(after, np.float64)
    differences = second - first
    gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
    means = (float(first.mean()), float(second.mean())) if len(first) else (math.nan, math.nan)
    is_binary = bool(np.isin(np.concatenate([first, second]), (0.0, 1.0)).all()) and len(first) > 0
    if is_binary:
        difference, p_value, test = _bonett_price(gained, lost, len(first)), mcnemar(gained, lost), MCNEMAR
    else:
        difference, p_value, test = mean_value(differences.tolist()), _student(differences), STUDENT
    return PairedDifference(*means, difference, p_value, test, gained, lost)


def p_text(p_value: float | None) -> str:
    """Returns a p-value in two digits, or a dash if there is none."""
    if p_value is None or math.isnan(p_value):
        return "-"
    return f"< {SMALLEST_P:.0e}" if p_value < SMALLEST_P else f"{p_value:.2g}"


def mcnemar(num_gained: int, num_lost: int) -> float:
    """Computes the exact p-value, min(1, 2 P(X <= min(gained, lost))) with X ~ Binomial(gained + lost, 1/2)."""
    n, least = num_gained + num_lost, min(num_gained, num_lost)
    return min(1.0, 2.0 * sum(math.comb(n, i) for i in range(least + 1)) / (1 << n))


def _bonett_price(gained: int, lost: int, N: int) -> Estimate:
    up, down = (gained + 1) / (N + 2), (lost + 1) / (N + 2)
    half = Z * math.sqrt((up + down - (up - down) ** 2) / (N + 2))
    low, high = max(-1.0, up - down - half), min(1.0, up - down + half)
    return Estimate((gained - lost) / N, low, high, BONETT_PRICE, N)


def _student(differences: np.ndarray) -> float:
    N = differences.size
    if N < 2:
        return math.nan
    error = float(differences.std(ddof=1)) / math.sqrt(N)
    mean = float(differences.mean())
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    from scipy.special import stdtr

    return float(2.0 * stdtr(N - 1, -abs(mean / error)))
