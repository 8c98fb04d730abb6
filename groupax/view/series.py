"""Curves: smoothing, and fewer points of long series. Pure functions of arrays."""

import math
from itertools import pairwise

import numpy as np


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """Returns the exponential moving average m_t = weight * m_{t-1} + (1 - weight) * y_t, divided by 1 - weight^t.

    Args:
        values: Series, [S]; NaN stays NaN and is ignored.
        weight: Weight of the earlier values, in [0, 1).

    Raises:
        ValueError: The weight is outside.

    Source: the bias correction of Adam (Kingma and Ba 2015, section 3).
    """
    if not 0 <= weight < 1:
        raise ValueError(f"a smoothing weight must be in [0, 1), got {weight}")
    if weight == 0:
        return values
    mean, known = 0.0, 1.0
    out = np.empty_like(values)
    for index, value in enumerate(values.tolist()):
        if math.isnan(value):
            out[index] = value
            continue
        mean = weight * mean + (1 - weight) * value
        known *= weight
        out[index] = mean / (1 - known)
    return out


def thinned(x: np.ndarray, y: np.ndarray, num_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns about `num_points` points of a series, including the minimum and the maximum of each stretch.

    Args:
        x: Positions, [S].
        y: Values, [S], NaN where there is none.
        num_points: Number of points; a series that is not longer is returned as it is.
    """
    if len(x) <= num_points:
        return x, y
    size = math.ceil(len(x) / max(num_points // 2, 1))
    rows = math.ceil(len(x) / size)
    padded = np.full(rows * size, np.nan)
    padded[: len(y)] = y
    padded = padded.reshape(rows, size)
    first = np.arange(rows) * size
    lows = first + np.where(np.isnan(padded), np.inf, padded).argmin(axis=1)
    highs = first + np.where(np.isnan(padded), -np.inf, padded).argmax(axis=1)
    kept = np.unique(np.concatenate([[0, len(x) - 1], lows, highs]))
    return x[kept], y[kept]


def stretch_means(x: np.ndarray, columns: np.ndarray, num_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns means over equal stretches, so that stacked columns remain comparable.

    Args:
        x: Positions, [S].
        columns: Values, [K, S], NaN where there is none.
        num_points: Largest number of stretches.

    Returns:
        x: Last position of each stretch, [Q].
        columns: Means, [K, Q], NaN where a stretch has no value.
    """
    if len(x) <= num_points:
        return x, columns
    edges = np.linspace(0, len(x), num_points + 1).astype(int)
    known = ~np.isnan(columns)
    totals = np.add.reduceat(np.where(known, columns, 0.0), edges[:-1], axis=1)
    counts = np.add.reduceat(known, edges[:-1], axis=1)
    means = np.divide(totals, counts, out=np.full(totals.shape, np.nan), where=counts > 0)
    return x[[end - 1 for _, end in pairwise(edges)]], means
