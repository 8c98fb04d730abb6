"""The protocols of what samples completions: an engine, or servers that take its place. Imports no jax."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.engine.prefix_cache import Place
from groupax.engine.sequence import Sequence as Completion
from groupax.settings.sampling import SamplingParams


@runtime_checkable
class SamplingSession(Protocol):
    """Sequences that are sampled together, to which others are added while they run."""

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        ...

    def submit(self, sequences: Iterable[Completion]) -> None:
        """Adds unstarted sequences."""
        ...

    def step(self) -> Iterator[tuple[Completion, int]]:
        """Samples for a moment and yields sequences that have grown or finished, with their numbers of new tokens."""
        ...

    def close(self) -> None:
        """Drops everything that waits or runs."""
        ...


@runtime_checkable
class ConversingSession(SamplingSession, Protocol):
    """A session whose turns of conversations do not depend on each other, and which stores their keys and values."""

    def converse(self, number: int, max_prompt_tokens: int, max_tokens: int) -> list[Place]:
        """Begins conversations, and returns a place for each (see `Session.converse`)."""
        ...


@runtime_checkable
class BatchSession(SamplingSession, Protocol):
    """A session whose steps take long, so that everything that can be sampled together must wait for one."""

    takes_whole_batches: bool


@runtime_checkable
class Sampler(Protocol):
    """Samples completions: an `Engine`, or servers that take its place."""

    def sequences(
        self, prompts: list[np.ndarray], params: SamplingParams, step: int = 0, first_prompt: int = 0
    ) -> list[Completion]:
        """Returns sequences that have not started (see `Engine.sequences`)."""
        ...

    def session(self) -> SamplingSession:
        """Returns a new session."""
        ...


@runtime_checkable
class PolicySampler(Sampler, Protocol):
    """A sampler whose weights are replaced before each rollout."""

    @property
    def params(self) -> dict[str, Any]:
        """The weights to sample from."""
        ...

    @params.setter
    def params(self, params: dict[str, Any]) -> None: ...

    def release(self) -> None:
        """Frees copies of the weights that only sampling needs; the next rollout creates them again."""
        ...


@runtime_checkable
class Cancellable(Protocol):
    """A sampler that another thread can interrupt while it waits, such as one that uses servers."""

    def cancel(self) -> None:
        """Cancels everything that is being sampled; its consumers receive a `RolloutCancelled`."""
        ...
