"""Which rows are computed together, and in which shape. Imports no jax.

Tokens lie one behind another, without padding but at one place; only attention sees rows side by side, longest first,
and takes their queries in a few query tiles, each for a range of columns and for as many rows as reach into it:

    row 0  |  tile 0  |  tile 1  |     tile 2     |
    row 1  |          |          |----------------'
    row 2  |          |----------'
    row 3  |----------'

A tile's queries see their own columns and those before them, so that little of what is hidden is computed. Every shape
is a program of its own, so a step is put together from micro-batches of a base size, its half, its quarter and its
eighth, and a shape that was used before is used again where it fits.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from groupax.settings.compute import SharePrefix

if TYPE_CHECKING:
    from groupax.types import Row

# The smallest sizes of a shape, so that shapes are few.
FEWEST_PROMPT_COLUMNS = 16
FEWEST_ROW_COLUMNS = 16
FEWEST_TOKENS = 32
# The room for rows' tokens comes in so many.
ROW_TOKENS = 64
# Tiles of rows in one micro-batch.
MAX_TILES = 5
# A tile more has to save such a part of the scores.
MIN_TILE_SAVING = 0.12
# Most queries of a kernel's block.
FUSED_BLOCK = 512
# What a query costs per column that it may see, in units of what a token costs in all else.
COLUMN_COST = 3e-4
# What a micro-batch takes beside its tokens, in tokens of each shard.
MICRO_BATCH_COST = 100
# A step is put together from sizes of base / 2^k for these k.
HALVINGS = (0, 1, 2, 3)
# How often parts are cut before a way to put a step together is given up.
MOST_CUTS = 24
# What known shapes that would do may cost more than a new one, as a part of the step and in tokens, times the square of
# the number of known shapes: compiling takes seconds, and small steps take less.
COMPILE_PART, COMPILE_TOKENS = 0.01, 40
# Most room in a new shape beyond what its rows need, as a part, so that later steps fit.
SPARE = 0.25
# A new shape is made wide enough for more than that where it costs at most such a part of its tokens.
WIDER = 0.1

Side = tuple[int, int]


@dataclass(frozen=True)
class AttentionCost:
    """How tiles are computed, as far as it matters which ones there are.

    Attributes:
        narrowest: fewest columns of one, where there are several.
        computed: which scores are: "all" of a tile's queries on the columns up to its end; what they have "seen" of
            these, in blocks; or that "from_first" column on, as if the columns before the tile were queries too.
    """

    narrowest: int = FEWEST_ROW_COLUMNS
    computed: Literal["all", "seen", "from_first"] = "all"

    def num_scores(self, tiles: Sequence[Side], prompt_columns: int) -> int:
        """Scores that are computed for the rows behind their prompts."""
        return sum(self._scores(rows, prompt_columns, *columns) for rows, *columns in ranges(tiles))

    def num_prompt_scores(self, prompts: int, columns: int) -> int:
        """Scores that are computed for the prompts themselves."""
        return self._scores(prompts, 0, 0, columns)

    def cost(self, shape: "Shape") -> float:
        """What computing a micro-batch takes, in tokens."""
        scores = self.num_prompt_scores(*shape.prompts) + self.num_scores(shape.tiles, shape.prompts[1])
        return shape.tokens + COLUMN_COST * scores

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
    """The sizes of one shard's part of a micro-batch.

    Attributes:
        tokens: of prompts and rows together.
        row_tokens: room for the rows' part of them.
        prompts: number and columns of the prompts' rectangle.
        tiles: for each, how many rows it has and its last column, where the next one begins.
    """

    tokens: int
    row_tokens: int
    prompts: Side
    tiles: tuple[Side, ...]

    @property
    def rows(self) -> Side:
        """Number and columns of all rows, as the objective sees them."""
        return self.tiles[0][0], self.tiles[-1][1]


def ranges(tiles: Sequence[Side]) -> list[tuple[int, int, int]]:
    """Of each tile the number of rows, its first column and its end."""
    firsts = [0, *(end for _, end in tiles)]
    return [(rows, first, end) for (rows, end), first in zip(tiles, firsts, strict=False)]


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of one prompt that stay together, by their indices."""

    rows: tuple[int, ...]
    prompt: int
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Of the prompt, without its last, and of the completions."""
        return self.prompt + sum(self.lengths)


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """One micro-batch: the parts of each shard, and the shape that they are computed in."""

    shards: list[list[Part]]
    shape: Shape


def plan(
    rows: "Sequence[Row]",
    num_shards: int,
    micro_batch_tokens: int,
    known: Sequence[Shape] = (),
    share_prefix: SharePrefix = "auto",
    longest: Side = (0, 0),
    attention_cost: AttentionCost = PLAIN,
) -> list[MicroBatchPlan]:
    """Micro-batches of at most about `micro_batch_tokens` tokens per shard.

    Of a few ways to put the step together the one is taken that costs the least, new shapes counting more.

    Args:
        rows: in any order.
        num_shards: devices over which each micro-batch is split.
        micro_batch_tokens: tokens of a micro-batch on one shard, prompts included.
        known: shapes that there are programs for.
        share_prefix: whether rows of a group share their prompt, as far as they are on one shard, or each has its own;
            "auto" does what costs less.
        longest: tokens of the longest prompt and completion that may come.
        attention_cost: how tiles are computed.
    """
    plans = []
    for share in {"always": (True,), "never": (False,), "auto": (True, False)}[share_prefix]:
        parts = _parts(rows, share)
        for sizes in _sizes(parts, num_shards, micro_batch_tokens, known):
            batches = _filled(rows, parts, num_shards, sizes)
            if batches is not None:
                plans.append(_in_shapes(batches, sizes, known, longest, attention_cost))

    def price(plan: list[MicroBatchPlan]) -> float:
        shapes = {each.shape for each in plan}
        cost = sum(attention_cost.cost(each.shape) + MICRO_BATCH_COST for each in plan)
        compiling = len(known) ** 2 * (COMPILE_PART * cost + COMPILE_TOKENS)
        return cost + compiling * len(shapes - set(known))

    return min(plans, key=price)


def _sizes(parts: Sequence[Part], num_shards: int, budget: int, known: Sequence[Shape]) -> Iterator[list[int]]:
    """Ways to put a step together: the sizes of micro-batches that likely hold these parts, largest first.

    The last one holds them in any case, each row in a micro-batch of its own if need be.
    """
    per_shard = max(1, -(-_load(parts) // num_shards))
    largest_row = round_up(max(part.prompt + part.lengths[-1] for part in parts), FEWEST_TOKENS)
    own = round_up(-(-per_shard // max(1, -(-per_shard // budget))), FEWEST_TOKENS)
    base = max((shape.tokens for shape in known), default=own)
    base = max(own, largest_row) if base < largest_row or per_shard > 4 * base else base
    of_known = {shape.tokens for shape in known}
    seen = set()
    for halvings in HALVINGS:
        unit = max(FEWEST_TOKENS, base >> halvings)
        for spare in range(3):
            left = -(-per_shard // unit) + spare
            whole = base // unit
            sizes = [base] * (left // whole)
            left %= whole
            sizes += [unit << bit for bit in reversed(range(halvings)) if left >> bit & 1]
            for each in (sizes, _in_known(sizes, of_known)):
                if tuple(each) not in seen:
                    seen.add(tuple(each))
                    yield each
    alone = sum(part.prompt * len(part.rows) + sum(part.lengths) for part in parts)  # each row with its own prompt
    for load in dict.fromkeys((per_shard, -(-alone // num_shards))):
        yield [base] * (-(-2 * load // base) + 1)


def _in_known(sizes: Sequence[int], known: Collection[int]) -> list[int]:
    """The sizes, those that are not known as two halves each, if these are known, or as four quarters."""
    smaller: list[int] = []
    for size in sizes:
        count = next((count for count in (1, 2, 4) if size % count == 0 and size // count in known), 1)
        smaller += [size // count] * count
    return smaller


def _in_shapes(
    batches: list[list[list[Part]]],
    sizes: Sequence[int],
    known: Sequence[Shape],
    longest: Side,
    attention_cost: AttentionCost,
) -> list[MicroBatchPlan]:
    """Each micro-batch with its shape: a known one of its size that fits, else a new one, with room for later steps."""
    planned, shapes = [], list(known)
    every = [part for shards in batches for shard in shards for part in shard]
    for shards, size in zip(batches, sizes, strict=True):
        fitting = (shape for shape in shapes if shape.tokens == size and all(_fits(shape, shard) for shard in shards))
        shape = min(fitting, key=attention_cost.cost, default=None)
        if shape is None:
            shape = _make_bucket(shards, size, every, shapes, longest, attention_cost)
            shapes.append(shape)
        planned.append(MicroBatchPlan(shards, shape))
    return planned


def _parts(rows: "Sequence[Row]", share: bool) -> list[Part]:
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group if share else index, []).append(index)
    return [_part(rows, indices) for indices in groups.values()]


def _filled(
    rows: "Sequence[Row]", parts: Sequence[Part], num_shards: int, sizes: Sequence[int]
) -> list[list[list[Part]]] | None:
    """Parts for each shard of micro-batches of these sizes, about equally full; None if they do not fit.

    The largest part of each bin that is too full is cut for that, which has its prompt computed more often.
    """
    rooms = [size for size in sizes for _ in range(num_shards)]
    parts = [piece for part in parts for piece in _cut(rows, part, max(sizes))]
    for _ in range(MOST_CUTS):
        bins = _balanced(parts, rooms)
        overfull = [own for own, room in zip(bins, rooms, strict=True) if _load(own) > room]
        if not overfull:
            order = [bins[first : first + num_shards] for first in range(0, len(rooms), num_shards)]
            return [sorted(shards, key=lambda shard: -_load(shard)) for shards in order]
        largest = {max(own, key=lambda part: part.num_tokens * (len(part.rows) > 1)) for own in overfull}
        if any(len(part.rows) < 2 for part in largest):
            return None
        parts = [piece for part in parts for piece in (_halves(rows, part) if part in largest else [part])]
    return None


def _cut(rows: "Sequence[Row]", part: Part, room: int) -> list[Part]:
    """The part in halves, quarters and so on, none of which is larger than the room if that can be."""
    if part.num_tokens <= room or len(part.rows) < 2:
        return [part]
    return [piece for half in _halves(rows, part) for piece in _cut(rows, half, room)]


def _halves(rows: "Sequence[Row]", part: Part) -> list[Part]:
    return [_part(rows, part.rows[0::2]), _part(rows, part.rows[1::2])]


def round_up(size: int, smallest: int) -> int:
    """The next of a few sizes: steps of an eighth to a quarter of the size."""
    if size <= smallest:
        return smallest
    step = max(8, 1 << ((size - 1).bit_length() - 3))
    return -(-size // step) * step


def _part(rows: "Sequence[Row]", indices: Sequence[int]) -> Part:
    ordered = sorted(indices, key=lambda index: len(rows[index].completion))
    lengths = tuple(len(rows[index].completion) for index in ordered)
    return Part(tuple(ordered), len(rows[indices[0]].prompt) - 1, lengths)


def _load(parts: Sequence[Part]) -> int:
    return sum(part.num_tokens for part in parts)


def _balanced(parts: Sequence[Part], rooms: Sequence[int]) -> list[list[Part]]:
    """Largest first, each into the bin that it leaves the emptiest, as a part of its room."""
    bins: list[list[Part]] = [[] for _ in rooms]
    by_room: dict[int, list[tuple[int, int]]] = {}  # of bins with the same room a heap of loads and indices
    for index, room in enumerate(rooms):
        by_room.setdefault(room, []).append((0, index))
    sizes = {part: part.num_tokens for part in parts}
    for part in sorted(parts, key=lambda part: (-sizes[part], part.rows)):
        size = sizes[part]
        room = min(by_room, key=lambda room: ((by_room[room][0][0] + size) / room, by_room[room][0][1]))
        load, emptiest = by_room[room][0]
        bins[emptiest].append(part)
        heapq.heapreplace(by_room[room], (load + size, emptiest))
    return bins


def _make_bucket(
    shards: Sequence[Sequence[Part]],
    size: int,
    every: Sequence[Part],
    known: Sequence[Shape],
    longest: Side,
    attention_cost: AttentionCost,
) -> Shape:
    """A shape of so many tokens that holds these parts and likely those of later steps, to judge by all of this step.

    What would not cost much more is made wide enough for the longest rows, and for what known shapes of its size hold.
    """
    alike = [shape for shape in known if shape.tokens == size]
    spare = _spare(every)
    share = min(1.0, size / _load(every))
    num_parts = max(*(len(shard) for shard in shards), _expected(len(every), share, spare))
    # the rows' part of the tokens varies more than their number
    num_row_tokens = round((1 + 1.5 * spare) * max(sum(_lengths(shard)) for shard in shards))
    P = max(_count(num_parts), *(shape.prompts[0] for shape in alike), 0)
    widest, longest_row = (-(-columns // 8) * 8 for columns in longest)
    S = _columns(max(part.prompt for part in every), FEWEST_PROMPT_COLUMNS, widest)
    for wider in (*(shape.prompts[1] for shape in known), max(widest, FEWEST_PROMPT_COLUMNS)):
        extra = attention_cost.num_prompt_scores(P, wider) - attention_cost.num_prompt_scores(P, S)
        if wider > S and COLUMN_COST * extra <= WIDER * size:
            S = wider

    def few(tiles: Sequence[Side]) -> tuple[Side, ...]:
        return _merge_tiles(tiles, attention_cost, S)

    lengths = [_lengths(shard) for shard in shards]
    tiles = few(_tiles(lengths, _lengths(every), share, spare, attention_cost.narrowest, longest_row))
    for more in (*(shape.tiles for shape in alike), ((1, max(longest_row, FEWEST_ROW_COLUMNS)),)):
        wider = few(_union_tiles(tiles, more))
        extra = attention_cost.num_scores(wider, S) - attention_cost.num_scores(tiles, S)
        if COLUMN_COST * extra <= WIDER * size:
            tiles = wider
    return Shape(
        tokens=size,
        row_tokens=min(size, -(-num_row_tokens // ROW_TOKENS) * ROW_TOKENS),
        prompts=(P, S),
        tiles=tiles,
    )


def _spare(parts: Sequence[Part]) -> float:
    """Room beyond what rows need, as a part of it: as much as their lengths spread, but not more than `SPARE`."""
    lengths = _lengths(parts)
    mean = sum(lengths) / len(lengths)
    deviation = (sum((length - mean) ** 2 for length in lengths) / len(lengths)) ** 0.5
    return min(SPARE, deviation / max(mean, 1.0))


def _expected(count: int, share: float, spare: float) -> int:
    """Of so many, those in a micro-batch that gets such a share; with something to spare, at least one more."""
    return max(min(count, 1), int((1 + spare) * share * count + spare / SPARE))


def _lengths(parts: Sequence[Part]) -> list[int]:
    return [length for part in parts for length in part.lengths]


def _tiles(
    lengths: Sequence[Sequence[int]], every: Sequence[int], share: float, spare: float, narrowest: int, longest: int
) -> list[Side]:
    """Many tiles that hold the rows of each shard and, with some to spare, such a share of all rows."""
    last = _columns(max(every), FEWEST_ROW_COLUMNS, longest)
    ends = [min(narrowest, last)]
    while ends[-1] < last:
        ends.append(min(_columns(ends[-1] + narrowest, FEWEST_ROW_COLUMNS), last))

    def counts(lengths: Sequence[int]) -> list[int]:
        return [_reaching(lengths, first) for first in [0, *ends[:-1]]]

    expected = [_expected(count, share, spare) for count in counts(every)]
    most = [max(each) for each in zip(expected, *map(counts, lengths), strict=True)]
    return list(zip(most, ends, strict=True))


def _reaching(lengths: Sequence[int], first: int) -> int:
    """How many rows reach into a tile that begins there; all do into the first one, empty ones too."""
    return sum(max(length, 1) > first for length in lengths)


def _union_tiles(some: Sequence[Side], others: Sequence[Side]) -> list[Side]:
    """Tiles that hold what either of these hold."""
    ends = sorted({end for tiles in (some, others) for _, end in tiles})
    return [(max(rows for tiles in (some, others) for rows, last in tiles if last >= end), end) for end in ends]


def _merge_tiles(tiles: Sequence[Side], attention_cost: AttentionCost, prompt_columns: int) -> tuple[Side, ...]:
    """At most `MAX_TILES`, fewer where that costs little, and none too narrow: neighbours are put together."""

    def scores(tiles: Sequence[Side]) -> int:
        return attention_cost.num_scores(tiles, prompt_columns)

    def num_narrow(tiles: Sequence[Side]) -> int:
        return sum(end - first < attention_cost.narrowest for _, first, end in ranges(tiles))

    few = [(_count(rows), end) for rows, end in tiles]
    while len(few) > 1:
        merged = [[*few[:k], (few[k][0], few[k + 1][1]), *few[k + 2 :]] for k in range(len(few) - 1)]
        best = min(merged, key=lambda each: (num_narrow(each), scores(each)))
        is_dear = scores(best) > (1 + MIN_TILE_SAVING) * scores(few)
        if len(few) <= MAX_TILES and not num_narrow(few) and is_dear:
            break
        few = best
    return tuple(few)


def _fits(shape: Shape, parts: Sequence[Part]) -> bool:
    lengths = _lengths(parts)
    return (
        _load(parts) <= shape.tokens
        and sum(lengths) <= shape.row_tokens
        and len(parts) <= shape.prompts[0]
        and max((part.prompt for part in parts), default=0) <= shape.prompts[1]
        and max(lengths, default=0) <= shape.rows[1]
        and all(_reaching(lengths, first) <= rows for rows, first, _ in ranges(shape.tiles))
    )


def _count(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    count = max(count, 1)
    power = 1 << (count - 1).bit_length()
    return power // 4 * 3 if power >= 4 and count <= power // 4 * 3 else power


def _columns(size: int, fewest: int, most: int = 0) -> int:
    """The next of `fewest` and 24, 32, 48, 64, 96, 128, ..., but not more than `most` if that is enough."""
    steps = (step for power in range(4, 40) for step in (1 << power, 3 << (power - 1)))
    columns = next(step for step in steps if step >= max(size, fewest))
    return max(min(columns, most), fewest) if most >= size else columns
