"""The scheduler: it decides what fits into the cache and which sequence has which slot, on the host. Imports no jax.

The cache of a shard (a device of the data axes) is two rectangles: prompt slots x prompt columns and slots x columns,
and the slots' states if a model has recurrent layers. A plan counts it in tokens, together with temporary copies: one
layer's old keys and values, or states, while rows are moved, and those of the prompts of one admission.

Slots are numbered consecutively over all shards; shard d owns the slots d*B to (d+1)*B - 1. Neighbouring slots share a
prompt slot, so they hold sequences of one prompt. A group's rows are kept on few shards, because each shard computes
the prompts of its own slots.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupax.engine.sequence import Sequence

CHUNK_STEPS = 32  # tokens decoded between two visits to the host
TURN_STEPS = 8  # the same where tools wait for the end of a turn
MAX_SHARE = 16  # slots that share a prompt slot
# The smallest sizes of the cache and of a prefill, in columns; larger ones are buckets above them.
CACHE_COLUMNS = 128
PREFILL_COLUMNS = 32
# Maximum number of prompt tokens, with padding, that one admission computes on a shard (but at least one prompt).
PREFILL_TOKENS = 16_384
# The same where keys and values of stored prefixes may be copied to the device.
KNOWN_TOKENS = 1024
# Prompts are computed in pieces: maximum numbers of tokens and of attention scores, and minimum number of columns. On
# CPUs, small pieces are as efficient as large ones, and have less padding.
PIECE_TOKENS, CPU_PIECE_TOKENS = 1024, 256
PIECE_SCORES = 1 << 28
PIECE_COLUMNS = 64
# The fraction of the free memory that keys and values take by default.
FREE_FRAC = 0.8


@dataclass(frozen=True)
class CacheShape:
    """The shape of one shard's cache: `share` neighbouring slots share a prompt slot."""

    num_slots: int
    share: int
    num_prompt_columns: int
    num_columns: int

    @property
    def num_prompt_slots(self) -> int:
        """Number of prompts that it holds."""
        return self.num_slots // self.share

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose keys and values it has room for."""
        return self.num_slots // self.share * self.num_prompt_columns + self.num_slots * self.num_columns


@dataclass(frozen=True)
class Demand:
    """The most columns and rows of the cache that sequences need.

    Attributes:
        group_sizes: Number of sequences of each prompt.
        prompt_columns: Number of columns of the longest prompt.
        columns: Number of columns of the longest completion.
    """

    group_sizes: tuple[int, ...]
    prompt_columns: int
    columns: int


@dataclass(frozen=True)
class Plan:
    """The limits of each shard.

    Attributes:
        max_tokens: Maximum number of tokens whose keys and values exist at once.
        num_layers: Number of layers with keys and values.
        max_slots: Maximum number of completions decoded at once.
        adapts: Whether the numbers of slots and columns follow the running sequences. Each shape needs a program of its
            own, which pays where idle slots and columns cost time, as on a CPU.
        conversations: What conversations need at most; None without any. With them the number of slots never changes,
            and numbers of columns are powers of two. So the results of a turn do not depend on the others that are
            decoded at the same time, which tools decide by their speed.
        state_tokens: Size of a sequence's states in recurrent layers, in tokens.
        num_recurrent: Number of recurrent layers.
        by_block: Whether programs compute by blocks of columns, so that the numbers of columns do not change any
            result; on CPUs, with conversations.
    """

    max_tokens: int
    num_layers: int
    max_slots: int
    adapts: bool = False
    conversations: Demand | None = None
    state_tokens: int = 0
    num_recurrent: int = 0
    by_block: bool = False

    def with_conversations(self, demand: Demand, num_shards: int) -> "Plan":
        """Returns the plan for conversations with this largest demand."""
        max_slots = min(sum(demand.group_sizes), self.max_slots)
        plan = replace(self, conversations=demand, by_block=self.adapts, max_slots=max_slots)
        longest = plan.smallest_shape(plan.raised(demand, demand))
        num_slots = power_of_two(plan.max_slots, num_shards)
        while num_slots > 1 and not self.allows(replace(longest, num_slots=num_slots)):
            num_slots //= 2
        return replace(plan, max_slots=num_slots * num_shards)

    def demand(self, sequences: Iterable[Sequence], expected: Demand | None = None) -> Demand:
        """Returns what sequences, at least one, need of the cache at most, raised to what is expected of a batch."""
        sizes: dict[Any, int] = {}
        longest_prompt = longest_completion = 0
        for sequence in sequences:
            # turns of conversations do not share a prompt slot: what follows the first ones differs
            shares = sequence.group if sequence.place is None else id(sequence)
            sizes[shares] = sizes.get(shares, 0) + 1
            longest_prompt = max(longest_prompt, len(sequence.prompt))
            longest_completion = max(longest_completion, sequence.params.max_tokens)
        demand = Demand(tuple(sizes.values()), longest_prompt - 1, longest_completion)
        expected = self.conversations or expected
        return demand if expected is None else self.raised(demand, expected)

    def raised(self, demand: Demand, expected: Demand) -> Demand:
        """Returns the demand to choose a batch's shape by, so that a run, which expects this much, has few shapes."""
        groups, columns = demand.group_sizes, max(demand.columns, expected.columns)
        prompt_columns = max(demand.prompt_columns, expected.prompt_columns)
        if self.conversations is not None:
            groups = (1,) * max(self.max_slots, sum(groups))
            needed = demand.prompt_columns if self.adapts else prompt_columns
            prompt_columns, columns = (in_steps(size, CACHE_COLUMNS, 2) for size in (needed, columns))
        elif self.adapts:
            sizes = halvings(bucket(prompt_columns, PREFILL_COLUMNS), PREFILL_COLUMNS)
            prompt_columns = next(size for size in sizes if size >= demand.prompt_columns)
        elif sum(groups) < sum(expected.group_sizes) and _shared_rows(groups) == _shared_rows(expected.group_sizes):
            groups = expected.group_sizes
        return Demand(groups, prompt_columns, columns)

    def planned_tokens(self, shape: CacheShape) -> int:
        """Returns the maximum number of tokens whose keys and values exist at once under this shape."""
        stored, states = shape.num_tokens, self.state_tokens * shape.num_slots
        moved = max(-(-stored // self.num_layers), -(-states // max(1, self.num_recurrent)))
        admitted = admission_prompts(shape, has_prefixes=False) * (shape.num_prompt_columns + self.state_tokens)
        return stored + states + moved + admitted

    def allows(self, shape: CacheShape) -> bool:
        """Returns whether this shape is within the budget."""
        return self.planned_tokens(shape) <= self.max_tokens

    def smallest_shape(self, demand: Demand) -> CacheShape:
        """Returns the shape for one sequence of this demand."""
        return CacheShape(1, 1, bucket(demand.prompt_columns, PREFILL_COLUMNS), bucket(demand.columns, CACHE_COLUMNS))

    def check(self, demand: Demand) -> None:
        """Refuses sequences that can never run.

        Raises:
            ValueError: A sequence of this demand does not fit on a shard.
        """
        smallest = self.smallest_shape(demand)
        if not self.allows(smallest):
            raise ValueError(
                f"a completion of {demand.columns} tokens after a prompt of {demand.prompt_columns + 1} tokens needs "
                f"the keys and values of {self.planned_tokens(smallest)} tokens on a device at once, and there is room "
                f"for those of {self.max_tokens}; lower max_tokens, shorten the prompts, or allow the cache more memory"
            )

    def first_shape(self, demand: Demand, num_shards: int) -> CacheShape:
        """Returns the shape to start with: as many slots as there is work and room for, at the expected lengths.

        Raises:
            ValueError: A sequence of this demand does not fit on a shard.
        """
        self.check(demand)
        sizes, rows = demand.group_sizes, sum(demand.group_sizes)
        prompt_columns = bucket(demand.prompt_columns, PREFILL_COLUMNS)
        columns = halvings(bucket(demand.columns, CACHE_COLUMNS), CACHE_COLUMNS)
        expected = columns[-2:][0]
        num_slots = power_of_two(min(rows, self.max_slots), num_shards)
        while True:
            share = min(_shared_rows(sizes, waits=rows > num_shards * num_slots), num_slots)
            shape = CacheShape(num_slots, share, prompt_columns, expected)
            if num_slots == 1 or self.allows(shape):
                break
            num_slots //= 2
        full = replace(shape, num_columns=columns[-1])
        if self.adapts:
            return replace(shape, num_columns=columns[0])
        return full if self.allows(full) else shape

    def num_columns(self, needed: int, demand: Demand, present: int) -> int:
        """Returns the number of columns to continue with, given those that the next chunk needs and those present."""
        columns = halvings(bucket(demand.columns, CACHE_COLUMNS), CACHE_COLUMNS)
        enough = next((number for number in columns if number >= needed), columns[-1])
        return enough if self.adapts and enough <= present // 2 else max(enough, present)

    def smaller(self, shape: CacheShape) -> CacheShape:
        """Returns an allowed shape with fewer slots: fewer prompt slots first, then fewer slots in the last one."""
        while not self.allows(shape) and shape.num_slots > 1:
            share = shape.share if shape.num_prompt_slots > 1 else shape.share // 2
            shape = replace(shape, num_slots=shape.num_slots // 2, share=share)
        return shape


def in_steps(size: int, smallest: int, step: int) -> int:
    """Returns the smallest of 1, step, step^2, ... times `smallest` that is at least `size`."""
    columns = smallest
    while columns < size:
        columns *= step
    return columns


def halvings(size: int, smallest: int) -> list[int]:
    """Returns this size, its half, its quarter and so on, the smallest one first and none below `smallest`."""
    sizes = [size]
    while sizes[0] // 2 >= smallest:
        sizes.insert(0, sizes[0] // 2)
    return sizes


def piece_size(num_prompts: int, num_columns: int, num_heads: int, platform: str) -> tuple[int, int]:
    """Returns the numbers of prompts and of their columns that are computed at once.

    Both divide what there is, a power of two of prompts. Few short prompts need little padding then, and scores never
    exist for all columns of long prompts. `num_heads` counts the query heads of one device.
    """
    most = CPU_PIECE_TOKENS if platform == "cpu" else PIECE_TOKENS
    prompts = min(num_prompts, 1 << (max(1, most // num_columns).bit_length() - 1))
    columns = num_columns
    while columns > PIECE_COLUMNS and not columns % 16:
        if prompts * columns <= most and prompts * num_heads * columns * num_columns <= PIECE_SCORES:
            break
        columns //= 2
    return prompts, columns


def admission_prompts(shape: CacheShape, has_prefixes: bool) -> int:
    """Returns the number of prompts that one admission can have on a shard, a power of two.

    It is lower if stored keys and values may come from the host for each of them (`has_prefixes`).
    """
    most = (KNOWN_TOKENS if has_prefixes else PREFILL_TOKENS) // shape.num_prompt_columns
    return min(1 << (max(1, most).bit_length() - 1), shape.num_slots // shape.share)


def bucket(size: int, smallest: int) -> int:
    """Returns the smallest of 1, 1.5, 2, 3, 4, 6, 8, ... times `smallest` that is at least `size`."""
    step = smallest
    while True:
        for candidate in (step, step + step // 2):
            if candidate >= size:
                return candidate
        step *= 2


def power_of_two(size: int, parts: int = 1) -> int:
    """Returns the smallest power of two that times `parts` is at least `size`."""
    per_part = max(1, -(-size // parts))
    return 1 << (per_part - 1).bit_length()


def _shared_rows(group_sizes: Iterable[int], waits: bool = False) -> int:
    """Returns the number of sequences per prompt slot: a power of two that divides every group.

    A prompt slot is free again when its last sequence finishes. While others wait for that, fewer share one.
    """
    divisors = (size & -size for size in group_sizes)
    return min(*divisors, 2 if waits else MAX_SHARE, MAX_SHARE)


@dataclass(frozen=True)
class Admission:
    """Sequences that enter slots together.

    Attributes:
        firsts: The first sequence of each distinct prompt to compute, per shard, the shortest prompts first.
        prompt_slots: Pairs of a prompt slot and an index into its shard's prompts.
        slots: Pairs of a slot and the sequence that enters it.
    """

    firsts: list[list[Sequence]]
    prompt_slots: list[tuple[int, int]]
    slots: list[tuple[int, Sequence]]

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

    def compact(self, slots_per_shard: int) -> np.ndarray:
        """Gives each shard fewer slots, enough for its running sequences, and each slot its own prompt slot.

        Returns the index within its shard of the old slot that moves to each new slot.
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

    def grow(self, slots_per_shard: int) -> None:
        """Adds idle slots at the end of each shard."""
        added = [None] * (slots_per_shard - self.slots_per_shard)
        shards = range(0, len(self.slots), self.slots_per_shard)
        self.slots = [slot for first in shards for slot in (*self.slots[first : first + self.slots_per_shard], *added)]
        self.slots_per_shard = slots_per_shard


def _progress(sequence: Sequence | None) -> int:
    """Returns the number of tokens fed after the prompt's last one; -1 for an idle slot."""
    return -1 if sequence is None else len(sequence.tokens)
