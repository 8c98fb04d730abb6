"""Remote sampling in a run of several processes: only the primary process sends requests."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from groupax.engine.sequence import Sequence as Completion
from groupax.models.specs import Params
from groupax.parallel import processes
from groupax.parallel.transfer import to_host_on_primary
from groupax.serve.client import RemoteSampler
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
        return BroadcastSession(self.sample)

    def sample(self, sequences: list[Completion]) -> list[tuple[int, list[Any]]]:
        """Samples, and returns the index and the new values of each sequence, in the order in which they finish."""
        indices = {id(sequence): index for index, sequence in enumerate(sequences)}
        finished = self._sampler.stream(sequences)
        return [(indices[id(sequence)], [getattr(sequence, name) for name in UPDATED_FIELDS]) for sequence in finished]

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
    """Sequences that the primary process samples, all that wait in each step: a `engine.sampler.SamplingSession`.

    Args:
        sample: Samples sequences in the primary process (see `BroadcastSampler.sample`).
    """

    def __init__(self, sample: Callable[[list[Completion]], list[tuple[int, list[Any]]]]) -> None:
        self._sample = sample
        self._pending: list[Completion] = []

    @property
    def busy(self) -> bool:
        """True while any sequence waits."""
        return bool(self._pending)

    def submit(self, sequences: Iterable[Completion]) -> None:
        """Adds unstarted sequences."""
        self._pending += sequences

    def step(self) -> Iterator[tuple[Completion, int]]:
        """Runs all sequences to their ends and yields them with their numbers of tokens.

        Raises:
            RunError: see `RemoteSampler.stream`; raised in all processes.
        """
        sequences, self._pending = self._pending, []
        for index, values in processes.run_on_primary(lambda: self._sample(sequences)):
            for name, value in zip(UPDATED_FIELDS, values, strict=True):
                setattr(sequences[index], name, value)
            yield sequences[index], len(sequences[index].tokens)

    def close(self) -> None:
        """Drops what waits."""
        self._pending.clear()
