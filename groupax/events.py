"""The events of a run, and the stream that passes them to sinks. Imports no jax.

    trainer, collector, evaluation ──► EventStream ──► terminal, diagnostics, run folder, trackers, profile, listeners

Whatever happens in a run is an event, a frozen record. Everything that reports on a run is a sink: a callable that
takes every event and ignores those it has no use for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from groupax.core.types import Metrics, Rollout

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RunDescribed:
    """The run is set up: its number of optimizer steps, and facts to show about it, by label."""

    num_steps: int
    facts: Mapping[str, str]


@dataclass(frozen=True)
class RunStarted:
    """Training starts, or resumes after `step` optimizer steps; the run folder is prepared."""

    step: int
    num_steps: int


@dataclass(frozen=True)
class PhaseStarted:
    """A new phase of the run began, such as sampling; `total` is its number of items, if it has any."""

    name: str
    total: int | None = None


@dataclass(frozen=True)
class PhaseAdvanced:
    """This many items of the phase are done."""

    num_done: int


@dataclass(frozen=True)
class StepStarted:
    """The next optimizer step starts; `step` counts those that are complete."""

    step: int


@dataclass(frozen=True, eq=False)
class RolloutScored:
    """A rollout was sampled and scored.

    Attributes:
        step: Number of complete optimizer steps.
        groups: The completions of each prompt.
        metrics: The rollout's metrics.
        errors: The first error of each reward function that failed, by name.
    """

    step: int
    groups: Sequence[Sequence[Rollout]]
    metrics: Metrics
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Token statistics of a completion from an update's forward pass, which precedes the update.

    Attributes:
        logps: Log-probs of the tokens, [T].
        entropies: Entropies of the tokens' distributions in nats, [T].
    """

    logps: np.ndarray
    entropies: np.ndarray


@dataclass(frozen=True, eq=False)
class StepEnded:
    """An optimizer step is complete.

    Attributes:
        step: Its number, starting at 1.
        metrics: Metrics of this step.
        logged: Metrics averaged since the last line of `metrics.jsonl`, in the steps that write one; None in others.
        rollouts: The completions that the step is about.
        scores: Token scores of the completions that it trained on, by index into `rollouts`.
    """

    step: int
    metrics: Metrics
    logged: Metrics | None = None
    rollouts: Sequence[Rollout] = ()
    scores: Mapping[int, TokenScores] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Evaluated:
    """The policy was evaluated during training.

    Attributes:
        step: Number of complete optimizer steps.
        metrics: Metrics of all evaluation sets, named `eval_...`.
        sets: A `groupax.evaluation.evaluate.SetEvaluation` per evaluation set, by name.
        errors: The first error of each reward function that failed, by name.
    """

    step: int
    metrics: Metrics
    sets: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosed:
    """Something is wrong with the run; `text` says what, why, and how to fix it. A name is reported once per run."""

    step: int
    name: str
    text: str


@dataclass(frozen=True)
class Message:
    """A text for the user; a warning calls for action."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is complete at `uri`, a path or URL."""

    step: int
    uri: str


@dataclass(frozen=True)
class RunEnded:
    """Training has ended after `step` optimizer steps, and the model is saved."""

    step: int


Event = (
    RunDescribed
    | RunStarted
    | PhaseStarted
    | PhaseAdvanced
    | StepStarted
    | RolloutScored
    | StepEnded
    | Evaluated
    | Diagnosed
    | Message
    | CheckpointSaved
    | RunEnded
)
Emit = Callable[[Event], None]
Sink = Callable[[Event], object]
# A sink of the user's; the run ends after the current step if it returns True.
Listener = Callable[[Event], bool | None]


class EventStream:
    """Passes each event to all sinks, in their order.

    A sink may emit events while it handles one; they reach all sinks first.
    """

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = list(sinks)

    def emit(self, event: Event) -> None:
        """Passes the event to every sink."""
        for sink in self.sinks:
            sink(event)


def ignore(event: Event) -> None:
    """Does nothing with an event."""


def counted(items: Iterable[T], emit: Emit, name: str, total: int, afterwards: str) -> Iterator[T]:
    """Yields the items while the phase `name` counts them; then the phase `afterwards` starts."""
    emit(PhaseStarted(name, total))
    for num_done, item in enumerate(items, start=1):
        emit(PhaseAdvanced(num_done))
        yield item
    emit(PhaseStarted(afterwards))
