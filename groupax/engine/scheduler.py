"""Which sequence sits in which slot: host logic, without jax.

Slots are numbered through over all shards (devices of the data axes); shard d owns the slots d*B to (d+1)*B - 1.
Neighbouring slots form places, which hold sequences of one prompt. A group's rows are kept on as few shards as
possible, because each shard computes the prompts of its own slots.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from groupax.engine.plan import power_of_two, prefill_columns
from groupax.engine.sequence import Sequence

if TYPE_CHECKING:
    from groupax.engine.decode import Chunk


# Prompts are computed in several programs instead of one if that saves each shard so many tokens of padding.
PADDING_TOKENS = 512


@dataclass(frozen=True)
class Admission:
    """Sequences that enter slots together.

    Attributes:
        size: prompts of each shard and their columns, as they are computed, padding included.
        prompts: per shard, the distinct prompts to compute.
        places: (place, index into its shard's prompts).
        placed: (slot, sequence).
    """

    size: tuple[int, int]
    prompts: list[list[np.ndarray]]
    places: list[tuple[int, int]]
    placed: list[tuple[int, Sequence]]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that each shard computes, padding included."""
        return self.size[0] * self.size[1]


class Scheduler:
    """Waiting sequences, and the slots with the running ones.

    Args:
        num_shards: devices of the data axes.
        slots_per_shard: slots on each.
        share: neighbouring slots, a place, that continue one prompt; divides `slots_per_shard`.
    """

    def __init__(self, num_shards: int, slots_per_shard: int, share: int = 1) -> None:
        self.num_shards, self.slots_per_shard, self.share = num_shards, slots_per_shard, share
        self.slots: list[Sequence | None] = [None] * (num_shards * slots_per_shard)
        self.waiting: deque[list[Sequence]] = deque()  # sequences of one prompt, at most as many as share a place

    @property
    def running(self) -> list[Sequence]:
        """The sequences in slots."""
        return [sequence for sequence in self.slots if sequence]

    @property
    def queued(self) -> list[Sequence]:
        """The sequences that wait."""
        return [sequence for bundle in self.waiting for sequence in bundle]

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting) or bool(self.running)

    @property
    def num_stranded(self) -> int:
        """Idle slots that nobody can enter, because others of their places still run."""
        places = (self.slots[first : first + self.share] for first in range(0, len(self.slots), self.share))
        return sum(place.count(None) for place in places if any(place))

    @property
    def num_fed(self) -> int:
        """The largest number of tokens that a running sequence has fed behind its prompt."""
        return max((_progress(sequence) for sequence in self.running), default=0)

    def num_blocked(self, share: int = 1) -> int:
        """Waiting sequences for which no place would be free.

        Args:
            share: slots of a place, as they would be; they divide those that it has.
        """
        firsts = range(0, len(self.slots), share)
        num_free = sum(not any(self.slots[first : first + share]) for first in firsts)
        lengths = [
            len(bundle[first : first + share]) for bundle in self.waiting for first in range(0, len(bundle), share)
        ]
        return sum(lengths[num_free:])

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences at the end of the queue, those of one prompt beside each other."""
        filling: dict[tuple[int, int], list[Sequence]] = {}
        for sequence in sequences:
            bundle = filling.get(sequence.group)
            if bundle is None or len(bundle) == self.share:
                bundle = filling[sequence.group] = []
                self.waiting.append(bundle)
            bundle.append(sequence)

    def cancelled(self) -> list[Sequence]:
        """Sequences that were cancelled: waiting ones, which leave the queue, and running ones, which `retire` ends."""
        gone = [sequence for sequence in self.queued if sequence.finish_reason]
        left = ([sequence for sequence in bundle if not sequence.finish_reason] for bundle in self.waiting)
        self.waiting = deque(bundle for bundle in left if bundle)
        return gone + [sequence for sequence in self.running if sequence.finish_reason]

    def admit(self, max_prompts: int) -> list[Admission]:
        """Move waiting sequences into free places, in their order; nothing if there is none of either.

        Args:
            max_prompts: most distinct prompts of a shard; sequences of further ones go on waiting.

        Returns:
            Several admissions, by the lengths of their prompts, where that saves much padding.
        """
        per_shard = self.slots_per_shard // self.share
        free: list[list[int]] = [[] for _ in range(self.num_shards)]
        for place in reversed(range(self.num_shards * per_shard)):
            if not any(self.slots[place * self.share : (place + 1) * self.share]):
                free[place // per_shard].append(place)
        if not self.waiting or not any(free):
            return []
        known: list[set[tuple[int, int]]] = [set() for _ in range(self.num_shards)]
        taken: dict[int, list[Sequence]] = {}
        shard = 0
        while self.waiting and any(free):
            group = self.waiting[0][0].group
            if not free[shard] or group not in known[shard]:
                shard = max(range(self.num_shards), key=lambda d: len(free[d]))
            if group not in known[shard] and len(known[shard]) == max_prompts:
                break
            known[shard].add(group)
            place = free[shard].pop()
            taken[place] = self.waiting.popleft()
            for slot, sequence in enumerate(taken[place], start=place * self.share):
                self.slots[slot] = sequence
        return self._by_columns(taken)

    def _by_columns(self, taken: dict[int, list[Sequence]]) -> list[Admission]:
        """Admissions of sequences by their places, the shortest prompts first."""
        columns = {place: prefill_columns(len(bundle[0].prompt) - 1) for place, bundle in taken.items()}
        parts: list[Admission] = []
        rest = self._admission(taken, columns)
        for width in sorted(set(columns.values()))[:-1]:
            short = {place: bundle for place, bundle in taken.items() if columns[place] <= width}
            longer = {place: bundle for place, bundle in taken.items() if columns[place] > width}
            first, second = self._admission(short, columns), self._admission(longer, columns)
            if first.num_tokens + second.num_tokens + PADDING_TOKENS <= rest.num_tokens:
                parts.append(first)
                taken, rest = longer, second
        return [*parts, rest]

    def _admission(self, taken: dict[int, list[Sequence]], columns: dict[int, int]) -> Admission:
        prompts: list[list[np.ndarray]] = [[] for _ in range(self.num_shards)]
        known: dict[tuple[int, tuple[int, int]], int] = {}
        places, placed = [], []
        for place, bundle in taken.items():
            shard = place * self.share // self.slots_per_shard
            key = shard, bundle[0].group
            if key not in known:
                known[key] = len(prompts[shard])
                prompts[shard].append(bundle[0].prompt)
            places.append((place, known[key]))
            placed += enumerate(bundle, start=place * self.share)
        num_prompts = power_of_two(max(len(each) for each in prompts))
        return Admission((num_prompts, max(columns[place] for place in taken)), prompts, places, placed)

    def append(self, chunk: "Chunk") -> list[Sequence]:
        """Append a decoded chunk on the host to the running sequences; returns them, the cancelled ones too."""
        grown = []
        for slot, sequence in enumerate(self.slots):
            if sequence is None:
                continue
            grown.append(sequence)
            if sequence.finish_reason:
                continue
            num = int(chunk.count[slot])
            sequence.tokens += chunk.token[slot, :num].tolist()
            sequence.policy_logps += chunk.policy_logp[slot, :num].tolist()
            sequence.sampler_logps += chunk.sampler_logp[slot, :num].tolist()
            if sequence.params.logprobs:
                assert chunk.alternatives is not None, "fetched when wanted"
                assert chunk.alternative_logps is not None, "fetched when wanted"
                wanted = slice(0, sequence.params.logprobs)
                tokens = chunk.alternatives[slot, :num, wanted].tolist()
                logps = chunk.alternative_logps[slot, :num, wanted].tolist()
                sequence.alternatives += [list(zip(*pair, strict=True)) for pair in zip(tokens, logps, strict=True)]
            if chunk.stopped[slot]:
                sequence.finish_reason = "stop"
            elif len(sequence.tokens) >= sequence.params.max_tokens:
                sequence.finish_reason = "length"
        return grown

    def num_slots_needed(self) -> int:
        """Slots per shard that the running sequences take up."""
        shards = np.array([sequence is not None for sequence in self.slots]).reshape(-1, self.slots_per_shard)
        return int(shards.sum(axis=1).max())

    def compact(self, slots_per_shard: int) -> np.ndarray:
        """Give each shard fewer slots, enough for its running sequences, and each slot a place of its own.

        Returns:
            For each new slot the index within its shard of the old slot that moves there.
        """
        kept = []
        for first in range(0, len(self.slots), self.slots_per_shard):
            own = range(self.slots_per_shard)
            kept += sorted(own, key=lambda slot: self.slots[first + slot] is None)[:slots_per_shard]
        shard_of = np.repeat(np.arange(self.num_shards), slots_per_shard)
        self.slots = [
            self.slots[shard * self.slots_per_shard + slot] for shard, slot in zip(shard_of, kept, strict=True)
        ]
        self.slots_per_shard, self.share = slots_per_shard, 1
        return np.array(kept, np.int32)

    def preempt(self, num_prompt_slots: int, share: int) -> tuple[np.ndarray, np.ndarray]:
        """Keep on each shard the places and in them the slots that are furthest; the other sequences start again.

        These go to the front of the queue. There they are sampled once more, which costs the least for those that are
        not far.

        Args:
            num_prompt_slots: places per shard to keep, at most as many as there are.
            share: slots per place to keep, likewise.

        Returns:
            The places and the slots that are kept, by their indices within their shards.
        """
        kept_places, kept_slots = [], []
        for shard in range(self.num_shards):
            own = self.slots[shard * self.slots_per_shard : (shard + 1) * self.slots_per_shard]
            places = [range(first, first + self.share) for first in range(0, len(own), self.share)]
            furthest = sorted(places, key=lambda place: -max(_progress(own[slot]) for slot in place))[:num_prompt_slots]
            for place in sorted(furthest, key=lambda place: place.start):
                kept_places.append(place.start // self.share)
                kept_slots.append(sorted(sorted(place, key=lambda slot: -_progress(own[slot]))[:share]))
        slots = np.array(kept_slots, np.int32).reshape(self.num_shards, -1)
        kept = slots + self.slots_per_shard * np.arange(self.num_shards)[:, None]
        evicted = [sequence for slot, sequence in enumerate(self.slots) if sequence and slot not in kept]
        self.slots = [self.slots[slot] for slot in kept.reshape(-1)]
        self.slots_per_shard, self.share = num_prompt_slots * share, share
        others = self.queued
        self.waiting.clear()
        for sequence in evicted:
            sequence.cut(0)
        self.submit([*evicted, *others])
        return np.array(kept_places, np.int32), slots.reshape(-1)

    def fitting_share(self) -> int:
        """How many slots a place should have, at most as many as now, so that what waits leaves none of them idle."""
        return min((len(bundle) & -len(bundle) for bundle in self.waiting), default=self.share)

    def split(self, share: int) -> None:
        """Make several places of each, with `share` slots; it divides the number that they have."""
        waiting = self.queued
        self.waiting.clear()
        self.share = share
        self.submit(waiting)

    def grow(self, slots_per_shard: int) -> None:
        """Give each shard more slots, idle ones behind those that it has."""
        added = [None] * (slots_per_shard - self.slots_per_shard)
        shards = range(0, len(self.slots), self.slots_per_shard)
        self.slots = [slot for first in shards for slot in (*self.slots[first : first + self.slots_per_shard], *added)]
        self.slots_per_shard = slots_per_shard

    def free_finished(self) -> list[int]:
        """Free the slots of finished sequences; returns them."""
        freed = [slot for slot, sequence in enumerate(self.slots) if sequence and sequence.finish_reason]
        for slot in freed:
            self.slots[slot] = None
        return freed


def _progress(sequence: Sequence | None) -> int:
    """Tokens fed behind the prompt's last one; -1 for an idle slot."""
    return -1 if sequence is None else len(sequence.tokens)
