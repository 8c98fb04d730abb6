"""The plan of a step: which rows are computed together in a micro-batch, and in which shape. Imports no jax.

Every shape is a separate program. So a step is composed of micro-batches of a base size, its half, its quarter and its
eighth, and a shape that was used before is reused where it fits:

    rows ── group_rows ──► RowGroups ── _candidate_sizes ──► [4096, 4096, 1024], [4096, 2048, 2048], ...
                                                                  │ for each: _distribute, _choose_shapes
                                                                  ▼
                                                       the cheapest list of `MicroBatchPlan`s

In a shape tokens are concatenated: the prompts, padding, the rows. Attention alone sees rows as a rectangle, longest
first, and takes their queries in a few tiles: each is a range of columns, for all rows that reach into it, and sees its
own columns and those before them.

    row 0  |  tile 0  |  tile 1  |     tile 2     |
    row 1  |          |          |----------------'
    row 2  |          |----------'
    row 3  |----------'
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from groupax.core.settings.compute import SharePrefix
from groupax.core.types import Row
from groupax.engine.plan import bucket

# The smallest sizes of a shape, so that shapes are few.
MIN_COLUMNS = 16
# The room for tokens of rows is a multiple of this.
ROW_TOKENS = 64
# The most query tiles of a shape.
MAX_TILES = 5
# The share of the scores that a further tile has to save.
MIN_TILE_SAVING = 0.12
# The most queries in a block of a fused kernel.
FUSED_BLOCK = 512
# The cost of one score, in units of the cost of a token outside attention.
SCORE_COST = 3e-4
# The most slack in a new shape, as a share of what its rows need, so that later steps fit.
MAX_SLACK = 0.25
# A new shape is made wider than that where it costs at most this share of its tokens.
MAX_WIDENING_COST = 0.1
# The fewest tokens of a micro-batch.
MIN_TOKENS = 32
# The overhead of a micro-batch, in tokens of each shard.
MICRO_BATCH_COST = 100
# A step is composed of sizes base / 2^k for these k.
HALVINGS = (0, 1, 2, 3)
# How often groups are split before a list of sizes is given up.
MAX_SPLITS = 24
# By how much known shapes that fit may cost more than a new one: a share of the step and a number of tokens, times the
# square of the number of shapes before it. Compiling takes seconds, and small steps take less. What the new shape saves
# is saved in later steps too, likely in more of them the longer the known ones have served: after n updates the cost is
# divided by 1 + n / SERVED_UPDATES.
COMPILE_FRAC, COMPILE_TOKENS, SERVED_UPDATES = 0.02, 80, 10
# The number of rows or prompts and their columns; of a tile its number of rows and the column where it ends.
Size = tuple[int, int]


@dataclass(frozen=True)
class AttentionCost:
    """The cost of attention, by how tiles are computed.

    Attributes:
        min_columns: fewest columns of a tile, if there are several.
        computed: which scores are computed: "all" of a tile's queries on the columns up to its end; those that are
            "seen", in blocks; or those seen "from_first" on, as if the columns before the tile were queries too.
    """

    min_columns: int = MIN_COLUMNS
    computed: Literal["all", "seen", "from_first"] = "all"

    def num_scores(self, tiles: Sequence[Size], prompt_columns: int) -> int:
        """Returns the number of scores that are computed for rows on themselves and their prompts."""
        return sum(self._scores(rows, prompt_columns, *columns) for rows, *columns in tile_ranges(tiles))

    def num_prompt_scores(self, prompts: int, columns: int) -> int:
        """Returns the number of scores that are computed for the prompts themselves."""
        return self._scores(prompts, 0, 0, columns)

    def _scores(self, rows: int, before: int, first: int, end: int) -> int:
        width = end - first
        if self.computed == "from_first":
            return rows * (before + end) ** 2 // 2
        if self.computed == "seen":
            return rows * width * (2 * before + first + end + min(width, FUSED_BLOCK)) // 2
        return rows * width * (before + end)


PLAIN = AttentionCost()


@dataclass(frozen=True)
class Shape:
    """The sizes of one shard of a micro-batch."""

    tokens: int  # number of tokens, of prompts and rows together
    row_tokens: int  # how many of these are for rows
    prompts: Size  # number of prompts and their columns
    tiles: tuple[Size, ...]  # number of rows and end column of each query tile; the next one starts there

    @cached_property
    def rows(self) -> Size:
        """The number of rows and their columns."""
        return self.tiles[0][0], self.tiles[-1][1]


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows that share one computed prompt."""

    rows: tuple[int, ...]  # indices of the rows, shortest first
    prompt: int  # tokens of the prompt without its last, which is the rows' first input
    lengths: tuple[int, ...]  # tokens of each row's completion
    num_tokens: int  # tokens of the prompt and of all rows


def load(groups: Sequence[RowGroup]) -> int:
    """Returns the number of tokens of the groups."""
    return sum(group.num_tokens for group in groups)


def tile_ranges(tiles: Sequence[Size]) -> list[tuple[int, int, int]]:
    """Returns the number of rows, the first column and the end column of each tile."""
    firsts = [0, *(end for _, end in tiles)]
    return [(rows, first, end) for (rows, end), first in zip(tiles, firsts, strict=False)]


@lru_cache(maxsize=1024)
def cost_of(shape: Shape, attention_cost: AttentionCost) -> float:
    """Returns the cost of a micro-batch of this shape, in tokens."""
    scores = attention_cost.num_prompt_scores(*shape.prompts) + attention_cost.num_scores(shape.tiles, shape.prompts[1])
    return shape.tokens + SCORE_COST * scores


def fits(shape: Shape, groups: Sequence[RowGroup]) -> bool:
    """Returns whether a shard of this shape holds the groups."""
    lengths = [length for group in groups for length in group.lengths]
    return (
        load(groups) <= shape.tokens
        and sum(lengths) <= shape.row_tokens
        and len(groups) <= shape.prompts[0]
        and all(group.prompt <= shape.prompts[1] for group in groups)
        and all(length <= shape.rows[1] for length in lengths)
        and all(_num_reaching(lengths, first) <= rows for rows, first, _ in tile_ranges(shape.tiles))
    )


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
    served: int = 0,
) -> list[MicroBatchPlan]:
    """Divides rows into micro-batches of about at most `micro_batch_tokens` tokens per shard.

    Of a few ways to do this the cheapest is taken, where new shapes count extra, and less the more updates the known
    ones have `served`.
    """
    best, least = [], math.inf
    for share in {"always": (True,), "never": (False,), "auto": (True, False)}[share_prefix]:
        groups = group_rows(rows, share)
        for sizes in _candidate_sizes(groups, num_shards, micro_batch_tokens, known):
            batches = _distribute(rows, groups, num_shards, sizes)
            if batches is None:
                continue
            plan = _choose_shapes(batches, sizes, known, longest, attention_cost)
            num_new = len({each.shape for each in plan} - set(known))
            cost = sum(cost_of(each.shape, attention_cost) + MICRO_BATCH_COST for each in plan)
            squares = sum(index**2 for index in range(len(known), len(known) + num_new))
            cost += squares * (COMPILE_FRAC * cost + COMPILE_TOKENS) / (1 + served / SERVED_UPDATES)
            if cost < least:
                best, least = plan, cost
    assert best or not rows, "the last sizes hold all rows"
    return best


def group_rows(rows: Sequence[Row], share: bool) -> list[RowGroup]:
    """Groups the indices of rows by their prompt, or puts each into its own group."""
    indices: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        indices.setdefault(row.group if share else index, []).append(index)
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
    known_sizes = {shape.tokens for shape in known}
    largest_row = round_up(max(group.prompt + group.lengths[-1] for group in groups), MIN_TOKENS)
    even = round_up(-(-per_shard // max(1, -(-per_shard // budget))), MIN_TOKENS)
    base = max(known_sizes, default=even)  # the largest known size, unless it is too small for a row or for the step
    if base < largest_row or per_shard > 4 * base:
        base = max(even, largest_row)
    seen = set()
    for halvings in HALVINGS:
        unit = max(MIN_TOKENS, base >> halvings)
        for spare in range(3):
            units_per_base = base // unit
            num_base, num_units = divmod(-(-per_shard // unit) + spare, units_per_base)
            sizes = [base] * num_base
            sizes += [unit << bit for bit in reversed(range(halvings)) if num_units >> bit & 1]
            # each unknown size as two known halves, or else as four known quarters, if there are any
            parts = [next((num for num in (1, 2, 4) if size / num in known_sizes), 1) for size in sizes]
            split = [size // num for size, num in zip(sizes, parts, strict=True) for _ in range(num)]
            for each in (sizes, split):
                if tuple(each) not in seen:
                    seen.add(tuple(each))
                    yield each
    separate = sum(group.prompt * len(group.rows) + sum(group.lengths) for group in groups)  # each row with its prompt
    for tokens in dict.fromkeys((per_shard, -(-separate // num_shards))):
        yield [base] * (-(-2 * tokens // base) + 1)


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


def make_bucket(
    shards: Sequence[Sequence[RowGroup]],
    num_tokens: int,
    all_groups: Sequence[RowGroup],
    known: Sequence[Shape],
    longest: Size,
    attention_cost: AttentionCost,
) -> Shape:
    """Creates a shape that holds these groups, and likely those of later steps.

    It is made wide enough for the longest rows, and for what known shapes with as many tokens hold, where that costs
    little.
    """
    same_size = [shape for shape in known if shape.tokens == num_tokens]
    slack, share = _slack(all_groups), min(1.0, num_tokens / max(load(all_groups), 1))
    num_groups = max(*(len(shard) for shard in shards), _expected_count(len(all_groups), share, slack))
    # the tokens of rows vary more than their number
    num_row_tokens = round((1 + 1.5 * slack) * max(sum(_lengths(shard)) for shard in shards))
    longest_prompt, longest_row = (-(-columns // 8) * 8 for columns in longest)
    max_extra = MAX_WIDENING_COST * num_tokens

    P = max(bucket(num_groups, 1), *(shape.prompts[0] for shape in same_size), 0)
    S = _round_columns(max(group.prompt for group in all_groups), longest_prompt)
    for wider in (*(shape.prompts[1] for shape in known), max(longest_prompt, MIN_COLUMNS)):
        extra = attention_cost.num_prompt_scores(P, wider) - attention_cost.num_prompt_scores(P, S)
        if wider > S and SCORE_COST * extra <= max_extra:
            S = wider

    lengths = [_lengths(shard) for shard in shards]
    fine = _fine_tiles(lengths, _lengths(all_groups), share, slack, attention_cost.min_columns, longest_row)
    tiles = merge_tiles(fine, attention_cost, S)
    for others in (*(shape.tiles for shape in same_size), ((1, max(longest_row, MIN_COLUMNS)),)):
        wider_tiles = merge_tiles(union_tiles(tiles, others), attention_cost, S)
        extra = attention_cost.num_scores(wider_tiles, S) - attention_cost.num_scores(tiles, S)
        if SCORE_COST * extra <= max_extra:
            tiles = wider_tiles
    row_tokens = min(num_tokens, -(-max(num_row_tokens, 1) // ROW_TOKENS) * ROW_TOKENS)
    return Shape(num_tokens, row_tokens, prompts=(P, S), tiles=tiles)


def union_tiles(some: Sequence[Size], others: Sequence[Size]) -> list[Size]:
    """Returns tiles that hold whatever either of these hold."""
    ends = sorted({end for tiles in (some, others) for _, end in tiles})
    return [(max(rows for tiles in (some, others) for rows, last in tiles if last >= end), end) for end in ends]


def merge_tiles(tiles: Sequence[Size], attention_cost: AttentionCost, prompt_columns: int) -> tuple[Size, ...]:
    """Merges neighbours until there are at most `MAX_TILES`, none too narrow, and each saves enough scores."""

    def num_scores(tiles: Sequence[Size]) -> int:
        return attention_cost.num_scores(tiles, prompt_columns)

    def num_narrow(tiles: Sequence[Size]) -> int:
        return sum(end - first < attention_cost.min_columns for _, first, end in tile_ranges(tiles))

    merged = [(bucket(rows, 1), end) for rows, end in tiles]
    while len(merged) > 1:
        choices = [[*merged[:k], (merged[k][0], merged[k + 1][1]), *merged[k + 2 :]] for k in range(len(merged) - 1)]
        best = min(choices, key=lambda tiles: (num_narrow(tiles), num_scores(tiles)))
        is_expensive = num_scores(best) > (1 + MIN_TILE_SAVING) * num_scores(merged)
        if len(merged) <= MAX_TILES and not num_narrow(merged) and is_expensive:
            break
        merged = best
    return tuple(merged)


def _fine_tiles(
    lengths: Sequence[Sequence[int]], all_lengths: Sequence[int], share: float, slack: float, width: int, longest: int
) -> list[Size]:
    """Returns many narrow tiles that hold the rows of each shard and, with some slack, a share of all rows."""
    last = _round_columns(max(all_lengths), longest)
    ends = [min(width, last)]
    while ends[-1] < last:
        ends.append(min(_round_columns(ends[-1] + width), last))

    def counts(lengths: Sequence[int]) -> list[int]:
        return [_num_reaching(lengths, first) for first in [0, *ends[:-1]]]

    expected = [_expected_count(count, share, slack) for count in counts(all_lengths)]
    largest = [max(each) for each in zip(expected, *map(counts, lengths), strict=True)]
    return list(zip(largest, ends, strict=True))


def _num_reaching(lengths: Sequence[int], first: int) -> int:
    """Returns how many rows reach into a tile that starts at this column; all reach the first, even empty ones."""
    return sum(max(length, 1) > first for length in lengths)


def _slack(groups: Sequence[RowGroup]) -> float:
    """Returns the slack for later steps: the coefficient of variation of the lengths, at most `MAX_SLACK`."""
    lengths = _lengths(groups)
    mean = sum(lengths) / len(lengths)
    deviation = (sum((length - mean) ** 2 for length in lengths) / len(lengths)) ** 0.5
    return min(MAX_SLACK, deviation / max(mean, 1.0))


def _expected_count(count: int, share: float, slack: float) -> int:
    """Returns the number of items to expect in a micro-batch that holds a share of `count`; with slack at least one
    more."""
    return max(min(count, 1), int((1 + slack) * share * count + slack / MAX_SLACK))


def _lengths(groups: Sequence[RowGroup]) -> list[int]:
    return [length for group in groups for length in group.lengths]


def _round_columns(size: int, largest: int = 0) -> int:
    """Rounds up to 16, 24, 32, 48, 64, 96, 128, ..., but not beyond `largest` if that is enough."""
    columns = bucket(size, MIN_COLUMNS)
    return max(min(columns, largest), MIN_COLUMNS) if largest >= size else columns
