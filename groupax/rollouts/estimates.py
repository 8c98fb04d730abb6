"""Estimates over the items of an evaluation, with 95 % intervals. Imports no jax.

Items are the independent random draws, while completions of one item are not independent. An item therefore enters with
one number, the mean over its completions or its pass@k, and intervals follow from the spread of these numbers
("clustered by item").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
WILSON = "wilson"  # see `mean_share`
STUDENT = "student"  # see `mean_value`


@dataclass(frozen=True)
class Estimate:
    """A mean over items."""

    value: float  # mean; NaN if there are no items
    low: float  # lower end of the 95 % interval; NaN if there are too few items for one
    high: float  # upper end of the interval
    method: str  # name of the method of the interval
    num_items: int  # number of items

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{interval}"


def mean_share(shares: Sequence[float] | np.ndarray, num_draws: int = 1) -> Estimate:
    """Estimates the mean of a fraction per item, such as the fraction of correct completions, or pass@k.

    The interval is Wilson's score interval for p = mean(shares) with the number of independent draws that would have
    the observed spread between items, n = N p (1 - p) / var(shares), at least N and at most N * num_draws. For n,
    variance and p include one more item, half correct and half wrong, so that they are defined where all items agree.
    With one completion per item n is N: Wilson's interval itself.

    Source: Wilson (1927); the effective number of draws as in Korn and Graubard, Survey Methodology 24 (1998).
    """
    values = np.asarray(shares, np.float64)
    N = values.size
    if N == 0:
        return Estimate(math.nan, math.nan, math.nan, WILSON, 0)
    p = float(values.mean())
    mean = (values.sum() + 0.5) / (N + 1)
    variance = (((values - mean) ** 2).sum() + 0.5 * (mean**2 + (1.0 - mean) ** 2)) / (N + 1)
    n = N * mean * (1.0 - mean) / variance
    n = min(max(n, float(N)), float(N * num_draws))
    center = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    return Estimate(p, max(0.0, center - half), min(1.0, center + half), WILSON, N)


def mean_value(values: Sequence[float] | np.ndarray) -> Estimate:
    """Estimates the mean of any number per item, with Student's interval, mean +- t s / sqrt(N)."""
    given = np.asarray(values, np.float64)
    N = given.size
    mean = float(given.mean()) if N else math.nan
    if N < 2:
        return Estimate(mean, math.nan, math.nan, STUDENT, N)
    half = t_quantile(N - 1) * float(given.std(ddof=1)) / math.sqrt(N)
    return Estimate(mean, mean - half, mean + half, STUDENT, N)


def t_quantile(degrees: int) -> float:
    """Returns the 97.5 % quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2))


def pass_at_k(n: int, num_right: int, k: int) -> float:
    """Computes the probability that at least one of k of an item's n completions is correct, 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: k is above n.

    Source: arXiv:2107.03374, eq. 1.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} completions per item, there are {n}")
    return 1.0 - math.comb(n - num_right, k) / math.comb(n, k)


def powers_up_to(n: int) -> list[int]:
    """Returns 1, 2, 4, ... and n itself, the k for which pass@k is reported."""
    return sorted({1 << power for power in range(n.bit_length())} | {n})
