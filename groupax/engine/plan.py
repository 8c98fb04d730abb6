"""Plans what fits into the cache: its shapes, in few sizes, and its limits. Imports no jax.

The cache of a shard (a device of the data axes) is two rectangles: prompt slots x prompt columns and slots x columns,
and the slots' states if a model has recurrent layers. A plan counts it in tokens, together with temporary copies: one
layer's old keys and values, or states, while rows are moved, and those of the prompts of one admission.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from groupax.engine.sequence import Sequence

CHUNK_STEPS = 32  # tokens decoded between two visits to the host
TURN_STEPS = 8  # the same where tools wait for the end of a turn
MAX_SHARE = 16  # slots that share a prompt slot
# The smallest sizes of the cache, of the first part of a larger one, and of a prefill, in columns; others are buckets.
FEWEST_COLUMNS, CACHE_COLUMNS = 64, 128
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
    """The most columns and rows of the cache that sequences need."""

    group_sizes: tuple[int, ...]  # number of sequences of each prompt
    prompt_columns: int  # number of columns of the longest prompt
    columns: int  # number of columns of the longest completion


@dataclass(frozen=True)
class Plan:
    """The limits of each shard."""

    max_tokens: int  # maximum number of tokens whose keys and values exist at once
    num_layers: int  # number of layers with keys and values
    max_slots: int  # maximum number of completions decoded at once
    # whether the numbers of slots and columns follow the running sequences. Each shape needs a program of its own,
    # which pays where idle slots and columns cost time, as on a CPU
    adapts: bool = False
    # what conversations need at most; None without any. With them the number of slots never changes, and numbers of
    # columns are powers of two. So the results of a turn do not depend on the others that are decoded at the same time,
    # which tools decide by their speed
    conversations: Demand | None = None
    state_tokens: int = 0  # size of a sequence's states in recurrent layers, in tokens
    num_recurrent: int = 0  # number of recurrent layers
    # whether programs compute by blocks of columns, so that the numbers of columns do not change any result; on CPUs,
    # with conversations
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
        return CacheShape(1, 1, bucket(demand.prompt_columns, PREFILL_COLUMNS), bucket(demand.columns, FEWEST_COLUMNS))

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
        columns = halvings(bucket(demand.columns, FEWEST_COLUMNS), CACHE_COLUMNS)
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
        columns = halvings(bucket(demand.columns, FEWEST_COLUMNS), CACHE_COLUMNS)
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
