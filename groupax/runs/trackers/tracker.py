"""What a tracker is told, and which ones there are. Imports no jax."""

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.runs.rollout_log import beginning, prompt_text, valid_text
from groupax.settings.reporting import TrackerName
from groupax.types import Metrics, Rollout

SAMPLE_CHARACTERS = 4000  # of a text in a table of samples

# The module of each tracker, whose `open_tracker` makes it, and the package that it needs.
MODULES: dict[TrackerName, str] = {
    "wandb": "groupax.runs.trackers.wandb",
    "tensorboard": "groupax.runs.trackers.tensorboard",
    "trackio": "groupax.runs.trackers.trackio",
    "jsonl": "groupax.runs.trackers.jsonl",
}
PACKAGES: dict[TrackerName, str] = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio"}


@dataclass(frozen=True)
class TrackedRun:
    """Which run it is.

    Attributes:
        id: the same in every process that works on the run.
        name: to be shown.
        project: runs of one are shown together.
        folder: of the run; a tracker's own files lie in it.
        config: the run's settings.
        first_step: steps that were made before; what a tracker has of later ones is of no account.
    """

    id: str
    name: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    first_step: int


@dataclass(frozen=True)
class Sample:
    """A completion as a table shows it; `rewards` by function."""

    step: int
    prompt: str
    completion: str
    advantage: float
    finish_reason: str
    rewards: Mapping[str, float | None]

    @property
    def row(self) -> dict[str, Any]:
        """Its cells by column."""
        own: dict[str, Any] = {"step": self.step, "prompt": self.prompt, "completion": self.completion}
        rewards = {f"rewards/{name}": value for name, value in self.rewards.items()}
        return own | rewards | {"advantage": self.advantage, "finish_reason": self.finish_reason}


@runtime_checkable
class Tracker(Protocol):
    """Something that a run is told to. It is used by one thread, which may take its time."""

    def metrics(self, step: int, metrics: Metrics) -> None:
        """A line of metrics, of training or of an evaluation (`eval_...`); all numbers are finite."""

    def samples(self, samples: Sequence[Sample]) -> None:
        """Completions of a step."""

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Distributions by name, [N] each."""

    def diagnostic(self, step: int, name: str, text: str) -> None:
        """Something is off (see `groupax.runs.diagnostics`)."""

    def close(self) -> None:
        """The run ended."""


def open_tracker(name: TrackerName, run: TrackedRun) -> Tracker:
    """Begin to track a run, or go on with it."""
    return importlib.import_module(MODULES[name]).open_tracker(run)


def check_installed(names: Sequence[TrackerName]) -> None:
    """Refuse trackers whose package is not there.

    Raises:
        ValueError: one is missing.
    """
    for name in names:
        if not is_installed(name):
            raise ValueError(
                f"report_to has {name!r}, and the package {PACKAGES[name]} is not installed; "
                f"pip install 'groupax[{name}]', or leave it out of report_to"
            )


def is_installed(name: TrackerName) -> bool:
    """Whether a tracker's package, if it needs one, is there."""
    return name not in PACKAGES or importlib.util.find_spec(PACKAGES[name]) is not None


def samples_of(step: int, rollouts: Sequence[Rollout], most: int) -> list[Sample]:
    """The first completions of a rollout, with long texts cut."""
    return [
        Sample(
            step,
            beginning(prompt_text(row.prompt), SAMPLE_CHARACTERS),
            beginning(valid_text(row.text), SAMPLE_CHARACTERS),
            row.advantage,
            row.finish_reason,
            dict(row.rewards),
        )
        for row in rollouts[:most]
    ]


def finite(metrics: Metrics) -> Metrics:
    """Those of the metrics that are numbers, without the step, which is told beside them."""
    return {name: value for name, value in metrics.items() if name != "step" and math.isfinite(value)}
