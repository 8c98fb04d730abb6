"""The interface of trackers and the built-in ones by name. Imports no jax."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.core.errors import EXTRAS, require
from groupax.core.settings.references import import_attribute
from groupax.core.types import Metrics, Rollout
from groupax.runs.rollout_log import beginning, prompt_text, valid_text

SAMPLE_CHARACTERS = 4000  # of a text in a table of samples

BUILT_IN = {
    "wandb": "groupax.runs.trackers.services:WandbTracker",
    "tensorboard": "groupax.runs.trackers.services:TensorBoardTracker",
    "trackio": "groupax.runs.trackers.services:TrackioTracker",
}


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker records.

    Attributes:
        id: Identifier of the run, the same in every process that works on it.
        name: Name to show.
        project: Name under which several runs are shown together.
        folder: The run folder, in which a tracker's own files belong.
        config: The run's settings.
        first_step: Number of steps before this process; what a tracker has of later steps is void.
    """

    id: str
    name: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    first_step: int


class Tracker:
    """A service that records a run; a subclass overrides what it records. Training waits for each call."""

    @classmethod
    def check(cls) -> None:
        """Raises a ValueError that says what to do if the service cannot be used; called before a model is loaded."""

    def __init__(self, run: TrackedRun) -> None:
        """Starts to record the run, or resumes it."""

    def metrics(self, step: int, metrics: Metrics) -> None:
        """Records a line of metrics, of training or of an evaluation (`eval_...`); all numbers are finite."""

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Records completions of a step, each by the columns of a table."""

    def diagnostic(self, step: int, name: str, text: str) -> None:
        """Records that something is wrong (see `groupax.runs.diagnostics`)."""

    def close(self) -> None:
        """Writes or sends everything; the run has ended."""


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Creates the tracker of a built-in name or a "module:class" reference."""
    return import_attribute("report_to", BUILT_IN.get(name, name))(run)


def check_trackers(names: Sequence[str]) -> None:
    """Raises a ValueError if a package cannot be imported, there is no such tracker, or its `check` fails."""
    for name in names:
        if name in BUILT_IN:
            require(name, f"report_to={name!r}")
        tracker = import_attribute("report_to", BUILT_IN.get(name, name))
        if isinstance(tracker, type) and issubclass(tracker, Tracker):
            tracker.check()


def is_installed(name: str) -> bool:
    """Returns whether the package of a built-in tracker is installed."""
    return all(importlib.util.find_spec(module) for module in EXTRAS[name])


def samples_of(step: int, rollouts: Sequence[Rollout], num_samples: int) -> list[dict[str, Any]]:
    """Returns the first completions of a rollout as rows of a table, with long texts cut."""
    return [
        {
            "step": step,
            "prompt": beginning(prompt_text(row.prompt), SAMPLE_CHARACTERS),
            "completion": beginning(valid_text(row.text), SAMPLE_CHARACTERS),
            **{f"rewards/{name}": value for name, value in row.rewards.items()},
            "advantage": row.advantage,
            "finish_reason": row.finish_reason,
        }
        for row in rollouts[:num_samples]
    ]


def finite(metrics: Metrics) -> Metrics:
    """Returns the metrics that are finite numbers, without the step."""
    return {name: value for name, value in metrics.items() if name != "step" and math.isfinite(value)}
