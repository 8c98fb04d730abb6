"""Packing: the choice of rows that are computed together, and of their shape. Imports no jax.

Every shape is a separate program. So a step is composed of micro-batches of a base size, its half, its quarter and its
eighth, and a shape that was used before is reused where it fits:

    rows ── group_rows ──► RowGroups ── _candidate_sizes ──► [4096, 4096, 1024], [4096, 2048, 2048], ...
                                                                  │ for each: _distribute, _choose_shapes
                                                                  ▼
                                                       the cheapest list of `MicroBatchPlan`s
"""

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from groupax.core.settings.compute import SharePrefix
from groupax.core.types import Row
from groupax.training.shapes import PLAIN, AttentionCost, RowGroup, Shape, Size, cost_of, fits, load, make_bucket

# The fewest tokens of a micro-batch.
MIN_TOKENS = 32
# The overhead of a micro-batch, in tokens of each shard.
MICRO_BATCH_COST = 100
# A step is composed of sizes base / 2^k for these k.
HALVINGS = (0, 1, 2, 3)
# How often groups are split before a list of sizes is given up.
MAX_SPLITS = 24
# By how much known shapes that fit may cost more than a new one: a share of the step and a number of tokens, times the
# square of the number of shapes before it. Compiling takes seconds, and small steps take less.
COMPILE_FRAC, COMPILE_TOKENS = 0.02, 80


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """One micro-batch: the groups of each shard, and the shape that they are computed in."""

    shards: list[list[RowGroup]]
    shape: Shape


def plan_micro_batches(
    rows: Sequence[Row],
    num_shards: int,
    micro_batch_tokens: int,
    known: Sequence[Shape] = (),
    share_prefix: SharePrefix = "auto",
    longest: Size = (0, 0),
    attention_cost: AttentionCost = PLAIN,
) -> list[MicroBatchPlan]:
    """Divides rows into micro-batches of about at most `micro_batch_tokens` tokens per shard.

    Of a few ways to do this the cheapest is taken, where new shapes count extra.
    """
    best, least = [], math.inf
    for share in {"always": (True,), "never": (False,), "auto": (True, False)}[share_prefix]:
        groups = group_rows(rows, range(len(rows)), share)
        for sizes in _candidate_sizes(groups, num_shards, micro_batch_tokens, known):
            batches = _distribute(rows, groups, num_shards, sizes)
            if batches is None:
                continue
            plan = _choose_shapes(batches, sizes, known, longest, attention_cost)
            num_new = len({each.shape for each in plan} - set(known))
            cost = sum(cost_of(each.shape, attention_cost) + MICRO_BATCH_COST for each in plan)
            squares = sum(index**2 for index in range(len(known), len(known) + num_new))
            cost += squares * (COMPILE_FRAC * cost + COMPILE_TOKENS)
            if cost < least:
                best, least = plan, cost
    assert best or not rows, "the last sizes hold all rows"
    return best


def group_rows(rows: Sequence[Row], part: Sequence[int], share: bool) -> list[RowGroup]:
    """Groups some of the rows, by their indices, by their prompt, or puts each into its own group."""
    indices: dict[int, list[int]] = {}
    for index in part:
        indices.setdefault(rows[index].group if share else index, []).append(index)
    return [_row_group(rows, each) for each in indices.values()]


def _row_group(rows: Sequence[Row], indices: Sequence[int]) -> RowGroup:
    ordered = sorted(indices, key=lambda index: len(rows[index].completion))
    lengths = tuple(len(rows[index].completion) for index in ordered)
    prompt = len(rows[indices[0]].prompt) - 1
    return RowGroup(tuple(ordered), prompt, lengths, prompt + sum(lengths))


def _candidate_sizes(
    groups: Sequence[RowGroup], num_shards: int, budget: int, known: Sequence[Shape]
) -> Iterator[list[int]]:
    """Yields lists of micro-batch sizes that likely hold these groups, largest first.

    The last lists hold them in any case, each row in a separate micro-batch if necessary.
    """
    per_shard = max(1, -(-load(groups) // num_shards))
    base = _base_size(groups, per_shard, budget, known)
    known_sizes = {shape.tokens for shape in known}
    seen = set()
    for halvings in HALVINGS:
        unit = max(MIN_TOKENS, base >> halvings)
        for spare in range(3):
            units_per_base = base // unit
            num_base, num_units = divmod(-(-per_shard // unit) + spare, units_per_base)
            sizes = [base] * num_base
            sizes += [unit << bit for bit in reversed(range(halvings)) if num_units >> bit & 1]
            for each in (sizes, _split_unknown(sizes, known_sizes)):
                if tuple(each) not in seen:
                    seen.add(tuple(each))
                    yield each
    separate = sum(group.prompt * len(group.rows) + sum(group.lengths) for group in groups)  # each row with its prompt
    for tokens in dict.fromkeys((per_shard, -(-separate // num_shards))):
        yield [base] * (-(-2 * tokens // base) + 1)


def _base_size(groups: Sequence[RowGroup], per_shard: int, budget: int, known: Sequence[Shape]) -> int:
    """Returns the largest known size, unless it is too small for a row or much too small for the step."""
    largest_row = round_up(max(group.prompt + group.lengths[-1] for group in groups), MIN_TOKENS)
    even = round_up(-(-per_shard // max(1, -(-per_shard // budget))), MIN_TOKENS)
    base = max((shape.tokens for shape in known), default=even)
    return max(even, largest_row) if base < largest_row or per_shard > 4 * base else base


def _split_unknown(sizes: Sequence[int], known: Collection[int]) -> list[int]:
    """Replaces each unknown size by two known halves, or else by four known quarters, if there are any."""
    split: list[int] = []
    for size in sizes:
        count = next((count for count in (1, 2, 4) if size % count == 0 and size // count in known), 1)
        split += [size // count] * count
    return split


def round_up(size: int, smallest: int) -> int:
    """Rounds up to one of a few sizes, in steps of an eighth to a quarter of the size."""
    if size <= smallest:
        return smallest
    step = max(8, 1 << ((size - 1).bit_length() - 3))
    return -(-size // step) * step


def _distribute(
    rows: Sequence[Row], groups: Sequence[RowGroup], num_shards: int, sizes: Sequence[int]
) -> list[list[list[RowGroup]]] | None:
    """Distributes groups over the shards of micro-batches of these sizes, about equally full; None if they do not fit.

    The largest group of each shard that is too full is split, at the cost of computing its prompt twice.
    """
    capacities = [size for size in sizes for _ in range(num_shards)]
    largest = max(sizes)
    if any(group.num_tokens > largest for group in groups):
        groups = [piece for group in groups for piece in _split_to_fit(rows, group, largest)]
    for _ in range(MAX_SPLITS):
        bins = _balance(groups, capacities)
        overfull = [own for own, capacity in zip(bins, capacities, strict=True) if load(own) > capacity]
        if not overfull:
            micro_batches = [bins[first : first + num_shards] for first in range(0, len(bins), num_shards)]
            return [sorted(shards, key=lambda shard: -load(shard)) for shards in micro_batches]
        split = {max(own, key=lambda group: group.num_tokens * (len(group.rows) > 1)) for own in overfull}
        if any(len(group.rows) < 2 for group in split):
            return None
        groups = [piece for group in groups for piece in (_halves(rows, group) if group in split else [group])]
    return None


def _split_to_fit(rows: Sequence[Row], group: RowGroup, capacity: int) -> list[RowGroup]:
    """Splits a group into halves, quarters and so on, until each fits or is a single row."""
    if group.num_tokens <= capacity or len(group.rows) < 2:
        return [group]
    return [piece for half in _halves(rows, group) for piece in _split_to_fit(rows, half, capacity)]


def _halves(rows: Sequence[Row], group: RowGroup) -> list[RowGroup]:
    return [_row_group(rows, group.rows[0::2]), _row_group(rows, group.rows[1::2])]


def _balance(groups: Sequence[RowGroup], capacities: Sequence[int]) -> list[list[RowGroup]]:
    """Puts each group, largest first, into the bin that it leaves the emptiest in proportion to its capacity."""
    bins: list[list[RowGroup]] = [[] for _ in capacities]
    heaps: dict[int, list[tuple[int, int]]] = {}  # loads and indices of the bins with the same capacity
    for index, capacity in enumerate(capacities):
        heaps.setdefault(capacity, []).append((0, index))
    for group in sorted(groups, key=lambda group: (-group.num_tokens, group.rows)):
        size = group.num_tokens
        best = min(heaps, key=lambda capacity: ((heaps[capacity][0][0] + size) / capacity, heaps[capacity][0][1]))
        tokens, emptiest = heaps[best][0]
        bins[emptiest].append(group)
        heapq.heapreplace(heaps[best], (tokens + size, emptiest))
    return bins


def _choose_shapes(
    batches: list[list[list[RowGroup]]],
    sizes: Sequence[int],
    known: Sequence[Shape],
    longest: Size,
    attention_cost: AttentionCost,
) -> list[MicroBatchPlan]:
    """Gives each micro-batch the cheapest known shape of its size that fits, or else a new one."""
    planned, shapes = [], list(known)
    all_groups = [group for shards in batches for shard in shards for group in shard]
    for shards, size in zip(batches, sizes, strict=True):
        fitting = (shape for shape in shapes if shape.tokens == size and all(fits(shape, shard) for shard in shards))
        shape = min(fitting, key=lambda shape: cost_of(shape, attention_cost), default=None)
        if shape is None:
            shape = make_bucket(shards, size, all_groups, shapes, longest, attention_cost)
            shapes.append(shape)
        planned.append(MicroBatchPlan(shards, shape))
    return planned
