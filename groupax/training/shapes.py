"""Shapes of micro-batches: their query tiles, their cost, and the choice of a new one. Imports no jax.

Tokens are concatenated: the prompts, padding, the rows. Attention alone sees rows as a rectangle, longest first, and
takes their queries in a few tiles: each is a range of columns, for all rows that reach into it, and sees its own
columns and those before them.

    row 0  |  tile 0  |  tile 1  |     tile 2     |
    row 1  |          |          |----------------'
    row 2  |          |----------'
    row 3  |----------'
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

# The smallest sizes of a shape, so that shapes are few.
MIN_PROMPT_COLUMNS = 16
MIN_ROW_COLUMNS = 16
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

    min_columns: int = MIN_ROW_COLUMNS
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

    P = max(_round_count(num_groups), *(shape.prompts[0] for shape in same_size), 0)
    S = _round_columns(max(group.prompt for group in all_groups), MIN_PROMPT_COLUMNS, longest_prompt)
    for wider in (*(shape.prompts[1] for shape in known), max(longest_prompt, MIN_PROMPT_COLUMNS)):
        extra = attention_cost.num_prompt_scores(P, wider) - attention_cost.num_prompt_scores(P, S)
        if wider > S and SCORE_COST * extra <= max_extra:
            S = wider

    lengths = [_lengths(shard) for shard in shards]
    fine = _fine_tiles(lengths, _lengths(all_groups), share, slack, attention_cost.min_columns, longest_row)
    tiles = merge_tiles(fine, attention_cost, S)
    for others in (*(shape.tiles for shape in same_size), ((1, max(longest_row, MIN_ROW_COLUMNS)),)):
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

    merged = [(_round_count(rows), end) for rows, end in tiles]
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
    last = _round_columns(max(all_lengths), MIN_ROW_COLUMNS, longest)
    ends = [min(width, last)]
    while ends[-1] < last:
        ends.append(min(_round_columns(ends[-1] + width, MIN_ROW_COLUMNS), last))

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


def _round_count(count: int) -> int:
    """Rounds up to 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    count = max(count, 1)
    power = 1 << (count - 1).bit_length()
    return power // 4 * 3 if power >= 4 and count <= power // 4 * 3 else power


def _round_columns(size: int, smallest: int, largest: int = 0) -> int:
    """Rounds up to `smallest`, 24, 32, 48, 64, 96, 128, ..., but not beyond `largest` if that is enough."""
    steps = (step for power in range(4, 40) for step in (1 << power, 3 << (power - 1)))
    columns = next(step for step in steps if step >= max(size, smallest))
    return max(min(columns, largest), smallest) if largest >= size else columns
