"""How large the cache may become. Imports no jax.

The cache is a rectangle per shard: places x prompt columns and slots x columns, the latter growing with the longest
running completion. A plan counts it in tokens, with what exists beside it for a while: one layer's old copy when rows
are moved, and the keys and values of the prompts of one admission.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

# The smallest sizes of the cache and of a prefill, in columns; larger ones are buckets above them.
MAX_SHARE = 16
CACHE_COLUMNS = 128
PREFILL_COLUMNS = 32
# Most prompt tokens, padding included, that are computed in one admission on a shard (but at least one prompt).
PREFILL_TOKENS = 16_384
# Prompts are computed in pieces of at most so many tokens and attention scores, but at least so many columns.
PIECE_TOKENS = 4096
PIECE_SCORES = 1 << 28
PIECE_COLUMNS = 64
# The part of the free memory that keys and values may take if nothing else is said.
FREE_FRAC = 0.8
# Until completions are seen to be longer, they are expected to take this part of `max_tokens`.
EXPECTED_FRAC = 0.5


@dataclass(frozen=True)
class CacheShape:
    """One shard's cache: `share` neighbouring slots read one prompt."""

    num_slots: int
    share: int
    num_prompt_columns: int
    num_columns: int

    @property
    def num_prompt_slots(self) -> int:
        """Prompts that it holds."""
        return self.num_slots // self.share

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values it has room for."""
        return self.num_prompt_slots * self.num_prompt_columns + self.num_slots * self.num_columns


@dataclass(frozen=True)
class Plan:
    """What is allowed on each shard.

    Attributes:
        max_tokens: keys and values of so many tokens, whatever they are needed for.
        num_layers: of the model.
        max_slots: completions decoded at once.
    """

    max_tokens: int
    num_layers: int
    max_slots: int

    def planned_tokens(self, shape: CacheShape) -> int:
        """The most tokens whose keys and values exist at once under this shape."""
        moved = -(-shape.num_tokens // self.num_layers)
        num_prompts = min(shape.num_prompt_slots, max_prompts(shape.num_prompt_columns))
        return shape.num_tokens + moved + num_prompts * shape.num_prompt_columns

    def allows(self, shape: CacheShape) -> bool:
        """Whether this shape is within the budget."""
        return self.planned_tokens(shape) <= self.max_tokens

    def smallest_shape(self, longest: tuple[int, int]) -> CacheShape:
        """Returns the shape for one sequence whose prompt and completion have at most so many tokens."""
        prompt_columns, columns = prefill_columns(longest[0]), bucket(longest[1], CACHE_COLUMNS)
        return CacheShape(1, 1, prompt_columns, columns)

    def check(self, longest: tuple[int, int]) -> None:
        """Refuse what can never run.

        Args:
            longest: the most tokens of a prompt and of a completion.

        Raises:
            ValueError: a sequence of these lengths does not fit on a shard.
        """
        smallest = self.smallest_shape(longest)
        if not self.allows(smallest):
            raise ValueError(
                f"a completion of {longest[1]} tokens behind a prompt of {longest[0]} tokens needs the keys and values "
                f"of {self.planned_tokens(smallest)} tokens on a device at once, and there is room for those of "
                f"{self.max_tokens}; lower max_tokens, shorten the prompts, or allow the cache more memory"
            )

    def first_shape(self, group_sizes: Iterable[int], num_shards: int, longest: tuple[int, int]) -> CacheShape:
        """The shape to begin with: as many slots as there is work and room for, at the expected lengths.

        Args:
            group_sizes: sequences of each prompt.
            num_shards: over which they are spread.
            longest: the most tokens of a prompt and of a completion.

        Raises:
            ValueError: a sequence of these lengths does not fit on a shard.
        """
        sizes = list(group_sizes)
        self.check(longest)
        prompt_columns = prefill_columns(longest[0])
        expected = expected_columns(longest[1])
        num_slots = power_of_two(min(sum(sizes), self.max_slots), num_shards)
        while True:
            waits = sum(sizes) > num_shards * num_slots
            shape = CacheShape(num_slots, min(_share(sizes, waits), num_slots), prompt_columns, expected)
            if num_slots == 1 or self.allows(shape):
                return shape
            num_slots //= 2

    def smaller(self, shape: CacheShape) -> CacheShape:
        """The shape with fewer slots that is allowed: fewer places first, then fewer slots in the last one."""
        while not self.allows(shape) and shape.num_slots > 1:
            share = shape.share if shape.num_prompt_slots > 1 else shape.share // 2
            shape = replace(shape, num_slots=shape.num_slots // 2, share=share)
        return shape


def longest_columns(prompt: int, completion: int, chunk_steps: int) -> tuple[int, int]:
    """The most columns that a prompt and a completion of so many tokens take."""
    return prompt - 1, completion + chunk_steps


def expected_columns(longest_completion: int) -> int:
    """The columns that completions are expected to need, of which the longest has at most so many tokens."""
    return bucket(int(EXPECTED_FRAC * longest_completion), CACHE_COLUMNS)


def piece_columns(num_prompts: int, num_columns: int, num_heads: int) -> int:
    """Columns of a piece of the prompts, a part of all columns, so that scores do not exist for all at once.

    Args:
        num_prompts: that are computed together.
        num_columns: of each.
        num_heads: query heads, of one device.
    """
    piece, scores = num_columns, num_prompts * num_heads * num_columns
    while piece > PIECE_COLUMNS and not piece % 16:
        if num_prompts * piece <= PIECE_TOKENS and scores * piece <= PIECE_SCORES:
            break
        piece //= 2
    return piece


def prefill_columns(num_tokens: int) -> int:
    """The columns for prompts of so many tokens, not counting the last one, which is decoding's first."""
    return bucket(num_tokens, PREFILL_COLUMNS)


def max_prompts(num_prompt_columns: int) -> int:
    """Prompts of so many columns that are computed in one admission, a power of two."""
    return 1 << (max(1, PREFILL_TOKENS // num_prompt_columns).bit_length() - 1)


def bucket(size: int, smallest: int) -> int:
    """The smallest of 1, 1.5, 2, 3, 4, 6, 8, ... times `smallest` that is at least `size`, so that sizes are few."""
    step = smallest
    while True:
        for candidate in (step, step + step // 2):
            if candidate >= size:
                return candidate
        step *= 2


def power_of_two(size: int, parts: int = 1) -> int:
    """The smallest power of two that times `parts` is at least `size`."""
    per_part = max(1, -(-size // parts))
    return 1 << (per_part - 1).bit_length()


def _share(group_sizes: list[int], waits: bool) -> int:
    """How many sequences share a place: a power of two that divides every group, so that no slot stays empty.

    A place is free again when its last sequence ends. While others wait for that, fewer share one.
    """
    divisors = (size & -size for size in group_sizes)
    return min(*divisors, 2 if waits else MAX_SHARE, MAX_SHARE)
