"""The positions of curves on the x axis, and the mean of several runs' curves."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupax.view.runs import Run

AXES = ("step", "tokens", "time")


def positions(run: Run, steps: np.ndarray, axis: str) -> np.ndarray:
    """Returns [S] positions of steps on an axis: steps, sampled tokens so far, or seconds spent in steps so far.

    Raises:
        ValueError: The axis is unknown.
    """
    if axis not in AXES:
        raise ValueError(f"by={axis!r} is none of {', '.join(AXES)}")
    if axis == "step" or not len(steps):
        return steps
    if axis == "tokens":
        known, values = run.series("num_tokens")
    else:
        known, step_s = run.series("step_time")
        values = np.cumsum(np.nan_to_num(np.diff(known, prepend=0.0) * step_s))
    if not len(known):
        return np.full(len(steps), np.nan)
    return np.interp(steps, np.concatenate([[0.0], known]), np.concatenate([[0.0], values]))


def placed(run: Run, diagnostics: Sequence[Mapping[str, Any]], axis: str) -> list[dict[str, Any]]:
    """Returns the diagnostics with their position `x` on an axis, None where they have no step.

    Raises:
        ValueError: The axis is unknown.
    """
    steps = np.array([math.nan if each["step"] is None else each["step"] for each in diagnostics], np.float64)
    return [{**each, "x": x} for each, x in zip(diagnostics, positions(run, steps, axis).tolist(), strict=True)]


def mean_and_spread(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes the mean of curves at the positions of all of them, and their standard deviation.

    Between its points a curve is interpolated linearly; beyond its ends it does not contribute.

    Args:
        curves: Positions [S] in order and values [S] of each curve, NaN where there is no value.

    Returns:
        x: [Q], positions.
        means: [Q], means over the curves that extend to a position.
        stds: [Q], standard deviations over the same curves, with a divisor of their number.
    """
    known = [(x[~np.isnan(y)], y[~np.isnan(y)]) for x, y in curves]
    known = [(x, y) for x, y in known if len(x)]
    if not known:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    x = np.unique(np.concatenate([each for each, _ in known]))
    values = np.stack([np.interp(x, own, y, left=np.nan, right=np.nan) for own, y in known])
    inside = ~np.isnan(values)
    counts = inside.sum(axis=0)
    means = np.where(inside, values, 0.0).sum(axis=0) / counts
    squares = np.where(inside, values - means, 0.0) ** 2
    return x, means, np.sqrt(squares.sum(axis=0) / counts)
