"""Curves over steps: their positions, smoothing and means, and the phases of steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupax.satellites.view.runs import Run

AXES = ("step", "tokens", "time")
WAIT_S = "time/wait_s"
COMPILE_S = "time/compile_s"
IN_SEQUENCE = ("rollout", "reward", "train")  # the order of a step's phases
AHEAD = ("wait", "train")  # of runs that generate rollouts during updates


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
    """Returns the diagnostics with their position `x` on an axis, None where they have no step."""
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
    return x, np.nanmean(values, axis=0), np.nanstd(values, axis=0)


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


def shares(run: Run) -> list[dict[str, Any]]:
    """Returns the total time of each phase of all steps, its share, and its median per step.

    A step's phases follow each other: compilation, rollout, waiting for rewards, update. A run with `time/wait_s`
    generates rollouts during updates; its steps wait for a rollout and update. A line of several steps has their mean.
    """
    steps, step_s = run.series("step_time")
    gaps = np.diff(steps, prepend=0.0)
    all_s = float(np.nansum(gaps * step_s)) or 1.0
    found = []
    for name, values in _phases(run, steps, step_s).items():
        total_s, median_s = float((gaps * values).sum()), float(np.median(values)) if values.size else None
        found.append({"phase": name, "total_s": total_s, "share": total_s / all_s, "median_s": median_s})
    return found


def _phases(run: Run, steps: np.ndarray, step_s: np.ndarray) -> dict[str, np.ndarray]:
    """Returns [S] the seconds of each phase of the steps, in the order in which they are shown.

    A run logs how long a step compiled, and not in which phases: this time is taken from the phases in proportion to
    what each took beyond its median.
    """
    names = AHEAD if WAIT_S in run.metric_names() else IN_SEQUENCE
    times = {name: _at(run, f"time/{name}_s", steps) for name in names}
    times["other"] = np.maximum(np.nan_to_num(step_s) - sum(times.values()), 0.0)
    compile_s = _at(run, COMPILE_S, steps)
    if not compile_s.any():
        return times
    logged = np.stack(list(times.values()))
    excess = np.maximum(logged - np.median(logged, axis=1, keepdims=True), 0.0)
    weights = np.where(excess.sum(axis=0) > 0, excess, logged)
    taken = np.minimum(compile_s * weights / np.maximum(weights.sum(axis=0), 1e-12), logged)
    return {"compile": taken.sum(axis=0), **dict(zip(times, logged - taken, strict=True))}


def _at(run: Run, name: str, steps: np.ndarray) -> np.ndarray:
    """Returns [S] a metric at these steps, 0 where it has no value."""
    own, values = run.series(name)
    found = np.zeros(len(steps))
    _, places, others = np.intersect1d(steps, own, return_indices=True)
    found[places] = np.nan_to_num(values[others])
    return found
