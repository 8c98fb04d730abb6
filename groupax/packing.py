"""Which rows are computed together, and in which shape. Imports no jax.

Tokens lie one behind another, without padding but at the end; only attention sees rectangles, a few per micro-batch, of
rows of similar length. Every shape is a program of its own, so shapes that were used before are used again where they
fit and waste little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from groupax.config import SharePrefix

if TYPE_CHECKING:
    from groupax.batch import Row

# With fewer, XLA's CPU kernels multiply the rows of a group and a single row differently.
FEWEST_PROMPT_COLUMNS = 24
FEWEST_ROW_COLUMNS = 16
FEWEST_TOKENS = 32
# Rectangles of rows in one micro-batch.
MOST_RECTANGLES = 3
# What a query costs per column that it may see, in units of what a token costs in all else.
COLUMN_COST = 3e-4
# What a micro-batch takes beside its tokens, in tokens.
MICRO_BATCH_COST = 200
# A known shape is used where it costs little more than one of its own would: so much more, as a part and in tokens,
# with each shape that is known, so that there cannot be many. Compiling takes seconds, and small steps take less.
TOLERANCE_PER_SHAPE, TOLERATED_TOKENS_PER_SHAPE = 0.06, 200
# How much more a new shape may cost than the narrowest one, to be wide enough for later steps.
WIDENING = 1.2
# The fullest shard has at most so many times the tokens of the mean, if cutting groups can bring that about.
IMBALANCE = 1.15

Side = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """The sizes of one shard's part of a micro-batch.

    Attributes:
        prompt_tokens, row_tokens: room for the tokens of prompts and of rows.
        prompts: number and columns of the prompts' rectangle.
        rows: number and columns of all rows, as the objective sees them.
        rectangles: number and columns of the rectangles in which rows attend, by columns.
    """

    prompt_tokens: int
    row_tokens: int
    prompts: Side
    rows: Side
    rectangles: tuple[Side, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return self.prompt_tokens + self.row_tokens

    @property
    def cost(self) -> float:
        """What computing it takes, in tokens."""
        (P, S), columns = self.prompts, self.prompts[1]
        return self.num_tokens + COLUMN_COST * (P * S * S + sum(B * T * (T + columns) for B, T in self.rectangles))


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
) -> list[MicroBatchPlan]:
    """Micro-batches of at most about `micro_batch_tokens` tokens per shard, of about equal size.

    Of a few numbers of micro-batches the one is taken that costs the least in known shapes or, dearer, in new ones.

    Args:
        rows: in any order.
        num_shards: devices over which each micro-batch is split.
        micro_batch_tokens: tokens of a micro-batch on one shard, prompts included.
        known: shapes that there are programs for.
        share_prefix: whether rows of a group share their prompt, as far as they are on one shard, or each has its own;
            "auto" does what costs less.
    """
    plans = []
    for share in {"always": (True,), "never": (False,), "auto": (True, False)}[share_prefix]:
        parts = _parts(rows, share)
        fewest = max(1, -(-_load(parts) // (num_shards * micro_batch_tokens)))
        plans += [
            _in_shapes(_micro_batches(rows, parts, num_shards, num), known)
            for num in range(fewest, fewest + 3)
            if num == fewest or num * num_shards <= len(rows)
        ]

    def price(plan: list[MicroBatchPlan]) -> float:
        costs = (
            each.shape.cost if each.shape in known else _tolerated(each.shape.cost, [*known, each.shape])
            for each in plan
        )
        return sum(costs) + MICRO_BATCH_COST * num_shards * len(plan)

    return min(plans, key=price)


def _in_shapes(batches: list[list[list[Part]]], known: Sequence[Shape]) -> list[MicroBatchPlan]:
    """Each micro-batch with its shape; one may have the shape of an earlier one that is new too."""
    planned, shapes = [], list(known)
    for shards in batches:
        shape = shape_for(shards, shapes)
        if shape not in shapes:
            shapes.append(shape)
        planned.append(MicroBatchPlan(shards, shape))
    return planned


def _parts(rows: "Sequence[Row]", share: bool) -> list[Part]:
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group if share else index, []).append(index)
    return [_part(rows, indices) for indices in groups.values()]


def _micro_batches(
    rows: "Sequence[Row]", parts: Sequence[Part], num_shards: int, num_batches: int
) -> list[list[list[Part]]]:
    """Parts for each shard of each micro-batch, of about equal numbers of tokens; large ones are cut for that."""
    parts, num_bins = list(parts), num_shards * num_batches
    best = bins = _balanced(parts, num_bins)
    for _ in range(4 * num_bins):
        fullest = max(bins, key=_load)
        if _load(fullest) <= IMBALANCE * sum(map(_load, bins)) / num_bins:
            break
        largest = max(fullest, key=lambda part: part.num_tokens * (len(part.rows) > 1))
        if len(largest.rows) < 2:
            break
        parts.remove(largest)
        parts += [_part(rows, largest.rows[0::2]), _part(rows, largest.rows[1::2])]
        bins = _balanced(parts, num_bins)
        best = min(best, bins, key=lambda bins: max(map(_load, bins)))
    best.sort(key=lambda each: (-_load(each), each[0].rows if each else ()))
    return [best[first : first + num_shards] for first in range(0, num_bins, num_shards) if best[first]]


def shape_for(shards: Sequence[Sequence[Part]], known: Sequence[Shape]) -> Shape:
    """The shape to compute these parts in: a known one that fits and wastes little, else a new one."""
    own = _own_shape(shards)
    fitting = (shape for shape in known if all(_fits(shape, shard) for shard in shards))
    best = min(fitting, key=lambda shape: shape.cost, default=None)
    return best if best and best.cost <= _tolerated(own.cost, known) else _widened(own, shards, known)


def _tolerated(cost: float, known: Sequence[Shape]) -> float:
    return cost + len(known) * (TOLERANCE_PER_SHAPE * cost + TOLERATED_TOKENS_PER_SHAPE)


def _widened(own: Shape, shards: Sequence[Sequence[Part]], known: Sequence[Shape]) -> Shape:
    """The shape as wide as the known ones in what costs little, so that more of what comes will fit."""
    lengths = [[n for part in shard for n in part.lengths] for shard in shards]
    used = {shape.rectangles for shape in known if all(placed(shape.rectangles, each) is not None for each in lengths)}
    rows = max(shape.rows[0] for shape in (own, *known)), max(shape.rows[1] for shape in (own, *known))
    num_prompts = max(shape.prompts[0] for shape in (own, *known))
    columns = max(shape.prompts[1] for shape in (own, *known))
    new = replace(own, rows=rows)
    for rectangles in sorted(used, key=lambda each: replace(own, rectangles=each).cost)[:1]:
        candidate = replace(new, rectangles=rectangles)
        new = candidate if candidate.cost <= WIDENING * own.cost else new
    tokens = replace(
        new,
        prompt_tokens=max(shape.prompt_tokens for shape in (own, *known)),
        row_tokens=max(shape.row_tokens for shape in (own, *known)),
    )
    new = tokens if tokens.cost <= WIDENING * own.cost else new
    for prompts in ((num_prompts, columns), (own.prompts[0], columns), (num_prompts, own.prompts[1])):
        candidate = replace(new, prompts=prompts)
        if candidate.cost <= WIDENING * own.cost:
            return candidate
    return new


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


def _balanced(parts: Sequence[Part], num_bins: int) -> list[list[Part]]:
    """Largest first, each into the emptiest bin."""
    bins: list[list[Part]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for part in sorted(parts, key=lambda part: (-part.num_tokens, part.rows)):
        emptiest = loads.index(min(loads))
        bins[emptiest].append(part)
        loads[emptiest] += part.num_tokens
    return bins


def _own_shape(shards: Sequence[Sequence[Part]]) -> Shape:
    parts = [part for shard in shards for part in shard]
    columns = _columns(max(part.prompt for part in parts), FEWEST_PROMPT_COLUMNS)
    longest = _columns(max(part.lengths[-1] for part in parts), FEWEST_ROW_COLUMNS)
    return Shape(
        prompt_tokens=round_up(max(sum(part.prompt for part in shard) for shard in shards), FEWEST_TOKENS),
        row_tokens=round_up(max(sum(sum(part.lengths) for part in shard) for shard in shards), FEWEST_TOKENS),
        prompts=(_count(max(len(shard) for shard in shards)), columns),
        rows=(_count(max(sum(len(part.rows) for part in shard) for shard in shards)), longest),
        rectangles=_rectangles([[n for part in shard for n in part.lengths] for shard in shards], columns, longest),
    )


def _rectangles(lengths: Sequence[Sequence[int]], prompt_columns: int, longest: int) -> tuple[Side, ...]:
    """A few rectangles that hold the rows of each shard, by columns: powers of two and the longest."""
    sides = [FEWEST_ROW_COLUMNS]
    while sides[-1] < longest:
        sides.append(min(2 * sides[-1], longest))
    counts = [
        [sum(low < n <= high for n in shard) for low, high in zip([0, *sides], sides, strict=False)]
        for shard in lengths
    ]
    classes = [(max(count), side) for count, side in zip(zip(*counts, strict=True), sides, strict=True) if any(count)]

    def cost(sides: Sequence[Side]) -> float:
        return sum(_count(B) * T * (T + prompt_columns + 1 / COLUMN_COST / 8) for B, T in sides)

    while len(classes) > 1:
        merged = [
            [*classes[:k], (classes[k][0] + classes[k + 1][0], classes[k + 1][1]), *classes[k + 2 :]]
            for k in range(len(classes) - 1)
        ]
        best = min(merged, key=cost)
        if len(classes) <= MOST_RECTANGLES and cost(best) > 1.1 * cost(classes):
            break
        classes = best
    return tuple((_count(B), T) for B, T in classes)


def _fits(shape: Shape, parts: Sequence[Part]) -> bool:
    lengths = [n for part in parts for n in part.lengths]
    return (
        sum(part.prompt for part in parts) <= shape.prompt_tokens
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
    """The next of `smallest` and 32, 48, 64, 96, 128, ..., multiples of 8."""
    if size <= smallest:
        return smallest
    return next(
        step for power in range(4, 40) for step in (1 << power, 3 << (power - 1)) if step >= size and not step % 8
    )
