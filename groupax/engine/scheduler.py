"""The scheduler: it decides which sequence has which slot, on the host. Imports no jax.

Slots are numbered consecutively over all shards; shard d owns the slots d*B to (d+1)*B - 1. Neighbouring slots share a
prompt slot, so they hold sequences of one prompt. A group's rows are kept on few shards, because each shard computes
the prompts of its own slots.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from groupax.engine.sequence import Sequence


@dataclass(frozen=True)
class Admission:
    """Sequences that enter slots together."""

    # the first sequence of each distinct prompt to compute, per shard, the shortest prompts first
    firsts: list[list[Sequence]]
    prompt_slots: list[tuple[int, int]]  # pairs of a prompt slot and an index into its shard's prompts
    slots: list[tuple[int, Sequence]]  # pairs of a slot and the sequence that enters it

    def padded(self, num_prompts: int, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the prompts of all shards without their last tokens, left-padded, [P, S], and their starts, [P]."""
        prompts = np.zeros((len(self.firsts) * num_prompts, num_columns), np.int32)
        starts = np.full(len(prompts), num_columns, np.int32)
        for row, first in self.rows(num_prompts):
            starts[row] = num_columns - (len(first.prompt) - 1)
            prompts[row, starts[row] :] = first.prompt[:-1]
        return prompts, starts

    def rows(self, num_prompts: int) -> Iterator[tuple[int, Sequence]]:
        """Yields the row of each prompt among `num_prompts` of each shard, with its first sequence."""
        for shard, own in enumerate(self.firsts):
            yield from enumerate(own, start=shard * num_prompts)


class Scheduler:
    """A queue of waiting sequences, and the slots with the running ones.

    Args:
        num_shards: Number of devices along the data axes.
        slots_per_shard: Number of slots on each shard.
        share: Number of neighbouring slots that share a prompt slot; divides `slots_per_shard`.
    """

    def __init__(self, num_shards: int, slots_per_shard: int, share: int = 1) -> None:
        self.num_shards, self.slots_per_shard, self.share = num_shards, slots_per_shard, share
        self.slots: list[Sequence | None] = [None] * (num_shards * slots_per_shard)
        self.waiting: deque[list[Sequence]] = deque()  # bundles of one prompt's sequences, at most `share` each

    @property
    def running(self) -> list[Sequence]:
        """Sequences in slots."""
        return [sequence for sequence in self.slots if sequence]

    @property
    def queued(self) -> list[Sequence]:
        """Sequences that wait."""
        return [sequence for bundle in self.waiting for sequence in bundle]

    def num_columns(self, chunk_steps: int) -> int:
        """Returns the number of columns that running and waiting sequences need for another chunk."""
        bundles = self.slots, *self.waiting
        sequences = (each for bundle in bundles for each in bundle if each is not None)
        ends = (min(len(each.tokens) + chunk_steps, each.params.max_tokens) for each in sequences)
        return max(ends, default=0)

    def num_blocked(self, others: Iterable[Sequence] = ()) -> int:
        """Returns the number of slots that would have to be added for all waiting sequences, and for others."""
        firsts = range(0, len(self.slots), self.share)
        num_free = sum(not any(self.slots[first : first + self.share]) for first in firsts)
        sizes = Counter(sequence.group for sequence in others).values()
        num_bundles = len(self.waiting) + sum(-(-size // self.share) for size in sizes)
        return max(0, num_bundles - num_free) * self.share

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Adds sequences at the end of the queue, those of one prompt in bundles."""
        filling: dict[tuple[int, int], list[Sequence]] = {}
        for sequence in sequences:
            bundle = filling.get(sequence.group)
            if bundle is None or len(bundle) == self.share:
                bundle = filling[sequence.group] = []
                self.waiting.append(bundle)
            bundle.append(sequence)

    def cancelled(self) -> list[Sequence]:
        """Returns cancelled sequences: waiting ones, which leave the queue, and running ones, which stay."""
        gone = [sequence for sequence in self.queued if sequence.finish_reason]
        left = ([sequence for sequence in bundle if not sequence.finish_reason] for bundle in self.waiting)
        self.waiting = deque(bundle for bundle in left if bundle)
        return gone + [sequence for sequence in self.running if sequence.finish_reason]

    def admit(self, max_prompts: int) -> Admission | None:
        """Moves waiting sequences into free prompt slots, in their order, as long as there are both."""
        per_shard = self.slots_per_shard // self.share
        free: list[list[int]] = [[] for _ in range(self.num_shards)]
        for prompt_slot in reversed(range(self.num_shards * per_shard)):
            if not any(self.slots[prompt_slot * self.share : (prompt_slot + 1) * self.share]):
                free[prompt_slot // per_shard].append(prompt_slot)
        if not self.waiting or not any(free):
            return None
        firsts: list[dict[tuple[int, int], Sequence]] = [{} for _ in range(self.num_shards)]
        taken: dict[int, list[Sequence]] = {}
        shard = 0
        while self.waiting and any(free):
            group = self.waiting[0][0].group
            if not free[shard] or group not in firsts[shard]:
                shard = max(range(self.num_shards), key=lambda d: len(free[d]))
            if group not in firsts[shard] and len(firsts[shard]) == max_prompts:
                break
            firsts[shard][group] = self.waiting[0][0]
            prompt_slot = free[shard].pop()
            taken[prompt_slot] = self.waiting.popleft()
            for slot, sequence in enumerate(taken[prompt_slot], start=prompt_slot * self.share):
                self.slots[slot] = sequence
        by_length = [sorted(own.items(), key=lambda each: len(each[1].prompt)) for own in firsts]
        index = [{group: index for index, (group, _) in enumerate(own)} for own in by_length]
        return Admission(
            [[first for _, first in own] for own in by_length],
            [(prompt_slot, index[prompt_slot // per_shard][own[0].group]) for prompt_slot, own in taken.items()],
            [pair for prompt_slot, own in taken.items() for pair in enumerate(own, start=prompt_slot * self.share)],
        )

    def rearrange(self, rows: np.ndarray, share: int) -> None:
        """Gives each shard the slots with these indices within it, [D, B], idle ones for -1, and another `share`."""
        firsts = range(0, len(self.slots), self.slots_per_shard)
        self.slots = [
            None if row < 0 else self.slots[first + row] for first, own in zip(firsts, rows, strict=True) for row in own
        ]
        self.slots_per_shard, self.share = rows.shape[1], share
