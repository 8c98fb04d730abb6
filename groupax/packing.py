"""Which rows are computed together, and in which shape. Imports no jax.

Tokens lie one behind another, without padding but at one place; only attention sees rectangles, a few per micro-batch,
of rows of similar length. Every shape is a program of its own, so a step is put together from micro-batches of a base
size, its half, its quarter and its eighth, and a shape that was used before is used again where it fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from groupax.config import SharePrefix

if TYPE_CHECKING:
    from groupax.batch import Row

# With fewer, XLA's CPU kernels multiply the rows of a group and a single row differently.
FEWEST_PROMPT_COLUMNS = 24
FEWEST_ROW_COLUMNS = 16
FEWEST_TOKENS = 32
# The room for rows' tokens comes in so many.
ROW_TOKENS = 64
# Rectangles of rows in one micro-batch.
MOST_RECTANGLES = 3
# What a query costs per column that it may see, in units of what a token costs in all else.
COLUMN_COST = 3e-4
# What a micro-batch takes beside its tokens, in tokens of each shard.
MICRO_BATCH_COST = 100
# A step is put together from sizes of base / 2^k for these k.
HALVINGS = (0, 1, 2, 3)
# What known shapes that would do may cost more than a new one, as a part of the step and in tokens, times the square of
# the number of known shapes: compiling takes seconds, and small steps take less.
COMPILE_PART, COMPILE_TOKENS = 0.01, 20
# Most room in a new shape beyond what its rows need, as a part, so that later steps fit.
SPARE = 0.25
# A new shape is made wide enough for more than that where it costs at most such a part of its tokens.
WIDER = 0.1

Side = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """The sizes of one shard's part of a micro-batch.

    Attributes:
        tokens: of prompts and rows together.
        row_tokens: room for the rows' part of them.
        prompts: number and columns of the prompts' rectangle.
        rows: number and columns of all rows, as the objective sees them.
        rectangles: number and columns of the rectangles in which rows attend, by columns.
    """

    tokens: int
    row_tokens: int
    prompts: Side
    rows: Side
    rectangles: tuple[Side, ...]

    @property
    def cost(self) -> float:
        """What computing it takes, in tokens."""
        P, S = self.prompts
        return self.tokens + COLUMN_COST * (P * S * S + sum(B * T * (T + S) for B, T in self.rectangles))


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
    """
    plans = []
    for share in {"always": (True,), "never": (False,), "auto": (True, False)}[share_prefix]:
        parts = _parts(rows, share)
        for sizes in _sizes(parts, num_shards, micro_batch_tokens, known):
            batches = _filled(rows, parts, num_shards, sizes)
            if batches is not None:
                plans.append(_in_shapes(batches, sizes, known, longest))

    def price(plan: list[MicroBatchPlan]) -> float:
        shapes = {each.shape for each in plan}
        cost = sum(each.shape.cost + MICRO_BATCH_COST for each in plan)
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
    seen = set()
    for halvings in HALVINGS:
        unit = max(FEWEST_TOKENS, base >> halvings)
        for spare in range(3):
            left = -(-per_shard // unit) + spare
            whole = base // unit
            sizes = [base] * (left // whole)
            left %= whole
            sizes += [unit << bit for bit in reversed(range(halvings)) if left >> bit & 1]
            if tuple(sizes) not in seen:
                seen.add(tuple(sizes))
                yield sizes
    yield [base] * (-(-2 * per_shard // base) + 1)


def _in_shapes(
    batches: list[list[list[Part]]], sizes: Sequence[int], known: Sequence[Shape], longest: Side
) -> list[MicroBatchPlan]:
    """Each micro-batch with its shape: a known one of its size that fits, else a new one, with room for later steps."""
    planned, shapes = [], list(known)
    every = [part for shards in batches for shard in shards for part in shard]
    for shards, size in zip(batches, sizes, strict=True):
        fitting = (shape for shape in shapes if shape.tokens == size and all(_fits(shape, shard) for shard in shards))
        shape = min(fitting, key=lambda shape: shape.cost, default=None)
        if shape is None:
            shape = _new_shape(shards, size, every, shapes, longest)
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

    Large parts are cut for that, which has their prompts computed more often.
    """
    parts, rooms = list(parts), [size for size in sizes for _ in range(num_shards)]
    for _ in range(4 * len(rooms) + 8):
        bins = _balanced(parts, rooms)
        fullest = max(range(len(rooms)), key=lambda index: _load(bins[index]) / rooms[index])
        if _load(bins[fullest]) <= rooms[fullest]:
            order = [bins[first : first + num_shards] for first in range(0, len(rooms), num_shards)]
            return [sorted(shards, key=lambda shard: -_load(shard)) for shards in order]
        largest = max(bins[fullest], key=lambda part: part.num_tokens * (len(part.rows) > 1))
        if len(largest.rows) < 2:
            return None
        parts.remove(largest)
        parts += [_part(rows, largest.rows[0::2]), _part(rows, largest.rows[1::2])]
    return None


def placed(rectangles: Sequence[Side], lengths: Sequence[int]) -> list[list[int]] | None:
    """For each rectangle the rows that it takes, each row in the narrowest one with room; None if some do not fit."""
    taken: list[list[int]] = [[] for _ in rectangles]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        for (num_rows, columns), mine in zip(rectangles, taken, strict=True):
            if lengths[row] <= columns and len(mine) < num_rows:
                mine.append(row)
                break
        else:
            return None
    return taken


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
    loads = [0] * len(rooms)
    for part in sorted(parts, key=lambda part: (-part.num_tokens, part.rows)):
        size = part.num_tokens
        emptiest = min(range(len(rooms)), key=lambda index: (loads[index] + size) / rooms[index])
        bins[emptiest].append(part)
        loads[emptiest] += size
    return bins


def _new_shape(
    shards: Sequence[Sequence[Part]], size: int, every: Sequence[Part], known: Sequence[Shape], longest: Side
) -> Shape:
    """A shape of so many tokens that holds these parts and likely those of later steps, to judge by all of this step.

    What would not cost much more is made wide enough for the longest rows, and for what known shapes of its size hold.
    """
    alike, spare = [shape for shape in known if shape.tokens == size], _spare(every)
    share = size / _load(every)
    num_parts = max(*(len(shard) for shard in shards), _expected(len(every), share, spare))
    num_rows = max(*(len(_lengths(shard)) for shard in shards), _expected(len(_lengths(every)), share, spare))
    # the rows' part of the tokens varies more than their number
    num_row_tokens = round((1 + 1.5 * spare) * max(sum(_lengths(shard)) for shard in shards))
    P = max(_count(num_parts), *(shape.prompts[0] for shape in alike), 0)
    S = _columns(max(part.prompt for part in every), FEWEST_PROMPT_COLUMNS)
    for wider in (*(shape.prompts[1] for shape in known), _columns(longest[0], FEWEST_PROMPT_COLUMNS)):
        if wider > S and COLUMN_COST * P * wider**2 <= WIDER * size:
            S = wider
    T = max(_columns(max(_lengths(every)), FEWEST_ROW_COLUMNS), *(shape.rows[1] for shape in known), 0)
    rectangles = _rectangles([_lengths(shard) for shard in shards], _lengths(every), share, spare, S)
    for more in (*((side,) for shape in alike for side in shape.rectangles), ((2, _columns(longest[1], T)),)):
        wider = _united(rectangles, more, S)
        if COLUMN_COST * (_area(wider, S) - _area(rectangles, S)) <= WIDER * size:
            rectangles = wider
    return Shape(
        tokens=size,
        row_tokens=min(size, -(-num_row_tokens // ROW_TOKENS) * ROW_TOKENS),
        prompts=(P, S),
        rows=(max(_count(num_rows), *(shape.rows[0] for shape in alike), 0), max(T, rectangles[-1][1])),
        rectangles=rectangles,
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


def _rectangles(
    lengths: Sequence[Sequence[int]], every: Sequence[int], share: float, spare: float, prompt_columns: int
) -> tuple[Side, ...]:
    """A few rectangles that hold the rows of each shard and, with some to spare, such a share of all rows.

    Their columns are powers of two and the longest.
    """
    longest, sides = _columns(max(every), FEWEST_ROW_COLUMNS), [FEWEST_ROW_COLUMNS]
    while sides[-1] < longest:
        sides.append(min(2 * sides[-1], longest))

    def counts(lengths: Sequence[int]) -> list[int]:
        return [sum(low < n <= high for n in lengths) for low, high in zip([0, *sides], sides, strict=False)]

    expected = [_expected(count, share, spare) for count in counts(every)]
    most = [max(each) for each in zip(expected, *map(counts, lengths), strict=True)]
    return _few([(count, side) for count, side in zip(most, sides, strict=True) if count], prompt_columns)


def _united(some: Sequence[Side], others: Sequence[Side], prompt_columns: int) -> tuple[Side, ...]:
    """Rectangles that hold what either of these hold."""
    counts: dict[int, int] = {}
    for rows, columns in (*some, *others):
        counts[columns] = max(counts.get(columns, 0), rows)
    return _few([(rows, columns) for columns, rows in sorted(counts.items())], prompt_columns)


def _few(rectangles: list[Side], prompt_columns: int) -> tuple[Side, ...]:
    """At most `MOST_RECTANGLES`, fewer where that costs little: neighbours are put together."""
    while len(rectangles) > 1:
        merged = [
            [*rectangles[:k], (rectangles[k][0] + rectangles[k + 1][0], rectangles[k + 1][1]), *rectangles[k + 2 :]]
            for k in range(len(rectangles) - 1)
        ]
        best = min(merged, key=lambda each: _area(each, prompt_columns))
        cost = _area(rectangles, prompt_columns)
        if len(rectangles) <= MOST_RECTANGLES and _area(best, prompt_columns) > 1.1 * cost:
            break
        rectangles = best
    return tuple((_count(rows), columns) for rows, columns in rectangles)


def _area(rectangles: Sequence[Side], prompt_columns: int) -> float:
    """Queries times the columns that they may see, and a little for each query."""
    return sum(_count(B) * T * (T + prompt_columns + 1 / COLUMN_COST / 8) for B, T in rectangles)


def _fits(shape: Shape, parts: Sequence[Part]) -> bool:
    lengths = _lengths(parts)
    return (
        _load(parts) <= shape.tokens
        and sum(lengths) <= shape.row_tokens
        and len(parts) <= shape.prompts[0]
        and max((part.prompt for part in parts), default=0) <= shape.prompts[1]
        and len(lengths) <= shape.rows[0]
        and max(lengths, default=0) <= shape.rows[1]
        and placed(shape.rectangles, lengths) is not None
    )


def _count(count: int) -> int:
    """The next of 2, 3, 4, 6, 8, 12, 16, ..."""
    count = max(count, 2)
    power = 1 << (count - 1).bit_length()
    return power // 4 * 3 if power >= 4 and count <= power // 4 * 3 else power


def _columns(size: int, smallest: int) -> int:
    """The next of `smallest` and 24, 32, 48, 64, 96, 128, ..."""
    if size <= smallest:
        return smallest
    return next(step for power in range(4, 40) for step in (1 << power, 3 << (power - 1)) if step >= size)
