"""The phases of steps on a time axis, from the times that a run logs."""

from typing import Any

import numpy as np

from groupax.view.runs import Run

MAX_STEPS = 200
WAIT_S = "time/wait_s"
COMPILE_S = "time/compile_s"
IN_SEQUENCE = ("rollout", "reward", "train")  # the order of a step's phases
AHEAD = ("wait", "train")  # of runs that generate rollouts during updates


def timeline(run: Run, last: float, num_steps: int) -> dict[str, Any]:
    """Returns the phases of up to `num_steps` logged steps that end with the step `last`.

    A step's phases follow each other: compilation, rollout, waiting for rewards, update. A run with `time/wait_s`
    generates rollouts during updates; its steps wait for a rollout and update, and the rollouts lie in a lane of their
    own, each ending when the step has received it. A line of several steps is one bar of each phase, with the mean of
    its steps. Compilation takes place within the other phases; see `_phases`.

    Returns:
        lanes: Names of the lanes.
        bars: Records with `step`, `lane`, `start_s` and `end_s`; seconds since the first step began.
        is_ahead: Whether rollouts are generated during updates.
    """
    steps, step_s = run.series("step_time")
    ends_s = np.cumsum(np.nan_to_num(np.diff(steps, prepend=0.0) * step_s))
    is_ahead = WAIT_S in run.metric_names()
    phases = _phases(run, steps, step_s)
    rollout_s = _at(run, "time/rollout_s", steps)
    shown = np.flatnonzero(steps <= last)[-min(num_steps, MAX_STEPS) :]
    bars: list[dict[str, Any]] = []
    for index in shown.tolist():
        step, end_s = float(steps[index]), float(ends_s[index])
        at_s = end_s - float(np.nan_to_num(step_s[index]))
        for name, seconds in phases.items():
            next_s = at_s + float(seconds[index])
            bars.append(_bar(step, name, at_s, next_s))
            at_s = next_s
            if is_ahead and name == "wait":
                bars.append(_bar(step, "rollout", max(at_s - float(rollout_s[index]), 0.0), at_s))
    lanes = ["rollout", *phases] if is_ahead else list(phases)
    return {"lanes": lanes, "bars": [bar for bar in bars if bar["end_s"] > bar["start_s"]], "is_ahead": is_ahead}


def shares(run: Run) -> list[dict[str, Any]]:
    """Returns the total time of each phase of all steps, its share, and its median per step."""
    steps, step_s = run.series("step_time")
    gaps = np.diff(steps, prepend=0.0)
    total_s = float(np.nansum(gaps * step_s)) or 1.0
    return [
        {
            "phase": name,
            "total_s": float((gaps * values).sum()),
            "share": float((gaps * values).sum()) / total_s,
            "median_s": float(np.median(values)) if values.size else None,
        }
        for name, values in _phases(run, steps, step_s).items()
    ]


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


def _bar(step: float, lane: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {"step": step, "lane": lane, "start_s": start_s, "end_s": end_s}


def _at(run: Run, name: str, steps: np.ndarray) -> np.ndarray:
    """Returns [S] a metric at these steps, 0 where it has no value."""
    own, values = run.series(name)
    found = np.zeros(len(steps))
    _, places, others = np.intersect1d(steps, own, return_indices=True)
    found[places] = np.nan_to_num(values[others])
    return found
