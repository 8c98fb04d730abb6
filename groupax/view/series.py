"""Smoothing and downsampling of curves. Pure functions of arrays."""

import math

import numpy as np


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """Computes the exponential moving average m_t = weight * m_{t-1} + (1 - weight) * y_t, divided by 1 - weight^t.

    Args:
        values: [S]; NaN stays NaN and does not contribute.
        weight: Weight of the earlier values, in [0, 1).

    Raises:
        ValueError: The weight is out of range.

    Source: the bias correction of Adam (Kingma and Ba 2015, section 3).
    """
    if not 0 <= weight < 1:
        raise ValueError(f"the smoothing weight must be in [0, 1), got {weight}")
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
    """Downsamples a series to about `num_points` points, including the minimum and maximum of every interval.

    Args:
        x: [S], positions of the points.
        y: [S], values of the points, NaN where there is none.
        num_points: Maximum number of points; a shorter series is returned unchanged.
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
