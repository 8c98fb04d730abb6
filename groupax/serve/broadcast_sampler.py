"""Remote sampling in a run of several processes: only the primary process sends requests."""

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from groupax.engine.sequence import Sequence as Completion
from groupax.models.specs import Params
from groupax.parallel import processes
from groupax.parallel.collectives import to_host_on_primary
from groupax.serve.client import RemoteSampler, RemoteSession
from groupax.settings.sampling import SamplingParams

UPDATED_FIELDS = ("tokens", "policy_logps", "sampler_logps", "versions", "text", "finish_reason")


class BroadcastSampler:
    """A `engine.sampler.PolicySampler` that samples on servers in the primary process and broadcasts the completions.

    Args:
        sampler: Samples on the servers.
        params: The weights; set them before each rollout. The primary process keeps a copy of them in host memory.
    """

    def __init__(self, sampler: RemoteSampler, params: Params) -> None:
        self.params = params
        self._sampler = sampler
        self._sent: Params | None = None
        self._copies: dict[int, tuple[weakref.ref[Any], Any]] = {}  # by id of the array that was copied

    def release(self) -> None:
        """Does nothing: the servers have their own copies of the weights."""

    def sequences(
        self, prompts: list[np.ndarray], params: SamplingParams, step: int = 0, first_prompt: int = 0
    ) -> list[Completion]:
        """Returns unstarted sequences (see `Engine.sequences`)."""
        return self._sampler.sequences(prompts, params, step, first_prompt)

    def session(self) -> "BroadcastSession":
        """Returns a new session. All processes must submit the same sequences to it."""
        if self.params is not self._sent:
            copies = self._copied(self.params)
            if processes.is_primary():
                self._sampler.params = copies
            self._sent = self.params
        return BroadcastSession(self._sampler.session() if processes.is_primary() else None)

    def _copied(self, params: Params) -> Params:
        """Returns the weights in host memory of the primary process; arrays that were copied before are reused."""
        copies = {}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array):  # a number, as an adapter's scale
                return leaf
            known, copy = self._copies.get(id(leaf), (None, None))
            if known is None or known() is not leaf:
                copy = to_host_on_primary(leaf)
            copies[id(leaf)] = weakref.ref(leaf), copy
            return copy

        result = jax.tree.map(copied, params)
        self._copies = copies
        return result


class BroadcastSession:
    """Sequences that the primary process samples: a `engine.sampler.SamplingSession`.

    Args:
        session: Samples on the servers; None in the other processes.
    """

    def __init__(self, session: RemoteSession | None) -> None:
        self._session = session
        self._numbers = itertools.count()
        self._under_way: dict[int, Completion] = {}  # by number, which the processes give alike

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self._under_way)

    def submit(self, sequences: Iterable[Completion]) -> None:
        """Adds unstarted sequences."""
        given = list(sequences)
        for sequence in given:
            self._under_way[next(self._numbers)] = sequence
        if self._session is not None:
            self._session.submit(given)

    def step(self) -> Iterator[tuple[Completion, int]]:
        """Waits a moment for a request to end; yields its sequences with their numbers of tokens.

        Raises:
            RunError: see `RemoteSession.step`; raised in all processes.
        """
        for number, values in processes.run_on_primary(self._finished):
            sequence = self._under_way.pop(number)
            for name, value in zip(UPDATED_FIELDS, values, strict=True):
                setattr(sequence, name, value)
            yield sequence, len(sequence.tokens)

    def close(self) -> None:
        """Cancels what is under way."""
        self._under_way.clear()
        if self._session is not None:
            self._session.close()

    def _finished(self) -> list[tuple[int, list[Any]]]:
        """Returns the numbers and the new values of sequences that have finished, in the primary process."""
        assert self._session is not None, "of the primary process"
        numbers = {id(sequence): number for number, sequence in self._under_way.items()}
        return [
            (numbers[id(sequence)], [getattr(sequence, name) for name in UPDATED_FIELDS])
            for sequence, _ in self._session.step()
        ]
