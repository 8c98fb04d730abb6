"""Servers that the first of several processes asks, for all of them."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from groupax.engine.sequence import Sequence as Completion
from groupax.models.specs import Params
from groupax.parallel import processes
from groupax.parallel.transfer import to_host_on_primary
from groupax.serve.client import RemoteSampler
from groupax.settings.sampling import SamplingParams

GROWN = ("tokens", "policy_logps", "sampler_logps", "versions", "text", "finish_reason")


class BroadcastSampler:
    """A `rollout.Sampler` for each of several processes: the first one asks servers, and all get the completions.

    Args:
        sampler: that asks them.
        params: the weights, set them anew before each rollout. The first process has a copy of them in its memory.
    """

    def __init__(self, sampler: RemoteSampler, params: Params) -> None:
        self.params = params
        self._sampler = sampler
        self._given: Params | None = None
        self._copies: dict[int, tuple[weakref.ref[Any], Any]] = {}  # by id of the array that was copied

    def release(self) -> None:
        """Nothing: weights to decode with are the servers' own."""

    def sequences(
        self, prompts: list[np.ndarray], params: SamplingParams, step: int = 0, first_prompt: int = 0
    ) -> list[Completion]:
        """Unstarted sequences (see `Engine.sequences`)."""
        return self._sampler.sequences(prompts, params, step, first_prompt)

    def stream(self, sequences: Iterable[Completion]) -> Iterator[Completion]:
        """Run sequences to their ends, yielded when all of them are finished. All processes must call this.

        Raises:
            RunError: as `RemoteSampler.stream`, in all processes.
        """
        if self.params is not self._given:
            copies = self._copied(self.params)
            if processes.is_primary():
                self._sampler.params = copies
            self._given = self.params
        sequences = list(sequences)
        for index, values in processes.run_on_primary(lambda: self._made(sequences)):
            for name, value in zip(GROWN, values, strict=True):
                setattr(sequences[index], name, value)
            yield sequences[index]

    def _made(self, sequences: list[Completion]) -> list[tuple[int, list[Any]]]:
        """Finished sequences by their indices, with what they have got, in the order of their ends."""
        indices = {id(sequence): index for index, sequence in enumerate(sequences)}
        finished = self._sampler.stream(sequences)
        return [(indices[id(sequence)], [getattr(sequence, name) for name in GROWN]) for sequence in finished]

    def _copied(self, params: Params) -> Params:
        """The arrays on the host of the first process. Those that were copied before are not copied again."""
        copies = {}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array):  # a number, as an adapter's scale
                return leaf
            known, copy = self._copies.get(id(leaf), (None, None))
            if known is None or known() is not leaf:
                copy = to_host_on_primary(leaf)
            copies[id(leaf)] = weakref.ref(leaf), copy
            return copy

        whole = jax.tree.map(copied, params)
        self._copies = copies
        return whole
