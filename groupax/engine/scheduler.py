"""The assignment of sequences to slots: host logic. Imports no jax.

Slots are numbered consecutively over all shards (devices of the data axes); shard d owns the slots d*B to (d+1)*B - 1.
Neighbouring slots share a prompt slot, so that they hold sequences of one prompt. A group's rows are kept on as few
shards as possible, because each shard computes the prompts of its own slots.
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


# Prompts are computed in several programs instead of one if that saves each shard this many tokens of padding.
PADDING_TOKENS = 512


@dataclass(frozen=True)
class Admission:
    """Sequences that enter slots together.

    Attributes:
        size: Numbers of prompts and of columns that each shard computes, padding included.
        prompts: The distinct prompts to compute, per shard.
        prompt_slots: Pairs of a prompt slot and an index into its shard's prompts.
        slots: Pairs of a slot and the sequence that enters it.
    """

    size: tuple[int, int]
    prompts: list[list[np.ndarray]]
    prompt_slots: list[tuple[int, int]]
    slots: list[tuple[int, Sequence]]

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens that each shard computes, padding included."""
        return self.size[0] * self.size[1]

    def padded(self, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the prompts of all shards without their last tokens, left-padded, [P, S], and their starts, [P].

        Args:
            size: Numbers of prompts and of columns for each shard.
        """
        num_prompts, length = size
        prompts = np.zeros((len(self.prompts) * num_prompts, length), np.int32)
        starts = np.full(len(prompts), length, np.int32)
        for shard, own in enumerate(self.prompts):
            for row, prompt in enumerate(own, start=shard * num_prompts):
                starts[row] = length - (len(prompt) - 1)
                prompts[row, starts[row] :] = prompt[:-1]
        return prompts, starts


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

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.waiting) or bool(self.running)

    @property
    def num_stranded(self) -> int:
        """Number of idle slots that no sequence can enter, because others of their prompt slots still run."""
        shared = (self.slots[first : first + self.share] for first in range(0, len(self.slots), self.share))
        return sum(slots.count(None) for slots in shared if any(slots))

    @property
    def num_fed(self) -> int:
        """Maximum number of tokens that a running sequence has fed after its prompt."""
        return max((_progress(sequence) for sequence in self.running), default=0)

    def num_blocked(self, share: int = 1) -> int:
        """Returns the number of waiting sequences for which no prompt slot would be free.

        Args:
            share: The number of slots that would share a prompt slot; divides the present one.
        """
        firsts = range(0, len(self.slots), share)
        num_free = sum(not any(self.slots[first : first + share]) for first in firsts)
        lengths = [
            len(bundle[first : first + share]) for bundle in self.waiting for first in range(0, len(bundle), share)
        ]
        return sum(lengths[num_free:])

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
        """Returns cancelled sequences: waiting ones, which leave the queue, and running ones, for `free_finished`."""
        gone = [sequence for sequence in self.queued if sequence.finish_reason]
        left = ([sequence for sequence in bundle if not sequence.finish_reason] for bundle in self.waiting)
        self.waiting = deque(bundle for bundle in left if bundle)
        return gone + [sequence for sequence in self.running if sequence.finish_reason]

    def admit(self, max_prompts: int) -> list[Admission]:
        """Moves waiting sequences into free prompt slots, in their order, as long as there are both.

        Args:
            max_prompts: Maximum number of distinct prompts of a shard; sequences of further prompts keep waiting.

        Returns:
            The admissions; several, by the lengths of their prompts, where that saves much padding.
        """
        per_shard = self.slots_per_shard // self.share
        free: list[list[int]] = [[] for _ in range(self.num_shards)]
        for prompt_slot in reversed(range(self.num_shards * per_shard)):
            if not any(self.slots[prompt_slot * self.share : (prompt_slot + 1) * self.share]):
                free[prompt_slot // per_shard].append(prompt_slot)
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
            prompt_slot = free[shard].pop()
            taken[prompt_slot] = self.waiting.popleft()
            for slot, sequence in enumerate(taken[prompt_slot], start=prompt_slot * self.share):
                self.slots[slot] = sequence
        return self._by_columns(taken)

    def _by_columns(self, taken: dict[int, list[Sequence]]) -> list[Admission]:
        """Returns admissions of sequences by their prompt slots, the shortest prompts first."""
        columns = {prompt_slot: prefill_columns(len(bundle[0].prompt) - 1) for prompt_slot, bundle in taken.items()}
        parts: list[Admission] = []
        rest = self._admission(taken, columns)
        for width in sorted(set(columns.values()))[:-1]:
            short = {prompt_slot: bundle for prompt_slot, bundle in taken.items() if columns[prompt_slot] <= width}
            longer = {prompt_slot: bundle for prompt_slot, bundle in taken.items() if columns[prompt_slot] > width}
            first, second = self._admission(short, columns), self._admission(longer, columns)
            if first.num_tokens + second.num_tokens + PADDING_TOKENS <= rest.num_tokens:
                parts.append(first)
                taken, rest = longer, second
        return [*parts, rest]

    def _admission(self, taken: dict[int, list[Sequence]], columns: dict[int, int]) -> Admission:
        prompts: list[list[np.ndarray]] = [[] for _ in range(self.num_shards)]
        known: dict[tuple[int, tuple[int, int]], int] = {}
        prompt_slots, slots = [], []
        for prompt_slot, bundle in taken.items():
            shard = prompt_slot * self.share // self.slots_per_shard
            key = shard, bundle[0].group
            if key not in known:
                known[key] = len(prompts[shard])
                prompts[shard].append(bundle[0].prompt)
            prompt_slots.append((prompt_slot, known[key]))
            slots += enumerate(bundle, start=prompt_slot * self.share)
        num_prompts = power_of_two(max(len(each) for each in prompts))
        return Admission(
            (num_prompts, max(columns[prompt_slot] for prompt_slot in taken)), prompts, prompt_slots, slots
        )

    def append(self, chunk: "Chunk") -> list[Sequence]:
        """Appends a decoded chunk on the host to the running sequences; returns them, the cancelled ones too."""
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
                assert chunk.alternatives is not None, "fetched when requested"
                assert chunk.alternative_logps is not None, "fetched when requested"
                requested = slice(0, sequence.params.logprobs)
                tokens = chunk.alternatives[slot, :num, requested].tolist()
                logps = chunk.alternative_logps[slot, :num, requested].tolist()
                sequence.alternatives += [list(zip(*pair, strict=True)) for pair in zip(tokens, logps, strict=True)]
            if chunk.stopped[slot]:
                sequence.finish_reason = "stop"
            elif len(sequence.tokens) >= sequence.params.max_tokens:
                sequence.finish_reason = "length"
        return grown

    def num_slots_needed(self) -> int:
        """Returns the number of slots per shard that the running sequences take up."""
        shards = np.array([sequence is not None for sequence in self.slots]).reshape(-1, self.slots_per_shard)
        return int(shards.sum(axis=1).max())

    def compact(self, slots_per_shard: int) -> np.ndarray:
        """Gives each shard fewer slots, enough for its running sequences, and each slot its own prompt slot.

        Returns:
            The index within its shard of the old slot that moves to each new slot.
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
        """Keeps each shard's prompt slots with the longest sequences, and the longest of each; preempts the others.

        Preempted sequences go to the front of the queue and are sampled again from their prompts, which costs the least
        for the shortest.

        Args:
            num_prompt_slots: Number of prompt slots to keep on each shard, at most all.
            share: Number of slots to keep of each prompt slot, at most all.

        Returns:
            The prompt slots and the slots that are kept, by their indices within their shards.
        """
        kept_prompt_slots, kept_slots = [], []
        for shard in range(self.num_shards):
            own = self.slots[shard * self.slots_per_shard : (shard + 1) * self.slots_per_shard]
            shared = [range(first, first + self.share) for first in range(0, len(own), self.share)]
            longest = sorted(shared, key=lambda slots: -max(_progress(own[slot]) for slot in slots))[:num_prompt_slots]
            for slots in sorted(longest, key=lambda slots: slots.start):
                kept_prompt_slots.append(slots.start // self.share)
                kept_slots.append(sorted(sorted(slots, key=lambda slot: -_progress(own[slot]))[:share]))
        slots = np.array(kept_slots, np.int32).reshape(self.num_shards, -1)
        kept = slots + self.slots_per_shard * np.arange(self.num_shards)[:, None]
        preempted = [sequence for slot, sequence in enumerate(self.slots) if sequence and slot not in kept]
        self.slots = [self.slots[slot] for slot in kept.reshape(-1)]
        self.slots_per_shard, self.share = num_prompt_slots * share, share
        others = self.queued
        self.waiting.clear()
        for sequence in preempted:
            sequence.cut(0)
        self.submit([*preempted, *others])
        return np.array(kept_prompt_slots, np.int32), slots.reshape(-1)

    def fitting_share(self) -> int:
        """Returns the largest number of slots per prompt slot with which waiting bundles leave none of them idle."""
        return min((len(bundle) & -len(bundle) for bundle in self.waiting), default=self.share)

    def split(self, share: int) -> None:
        """Splits prompt slots into several with `share` slots each, which divides the present number."""
        waiting = self.queued
        self.waiting.clear()
        self.share = share
        self.submit(waiting)

    def grow(self, slots_per_shard: int) -> None:
        """Adds idle slots at the end of each shard."""
        added = [None] * (slots_per_shard - self.slots_per_shard)
        shards = range(0, len(self.slots), self.slots_per_shard)
        self.slots = [slot for first in shards for slot in (*self.slots[first : first + self.slots_per_shard], *added)]
        self.slots_per_shard = slots_per_shard

    def free_finished(self) -> list[int]:
        """Frees the slots of finished sequences and returns them."""
        freed = [slot for slot, sequence in enumerate(self.slots) if sequence and sequence.finish_reason]
        for slot in freed:
            self.slots[slot] = None
        return freed


def _progress(sequence: Sequence | None) -> int:
    """Returns the number of tokens fed after the prompt's last one; -1 for an idle slot."""
    return -1 if sequence is None else len(sequence.tokens)
