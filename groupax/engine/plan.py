"""The limits of the cache. Imports no jax.

The cache of a shard is two rectangles: prompt slots x prompt columns and slots x columns, the latter growing with the
longest running completion. A plan counts it in tokens, together with temporary copies: one layer's old keys and values
while rows are moved, and the keys and values of the prompts of one admission.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

CHUNK_STEPS = 32  # tokens decoded between two visits to the host
MAX_SHARE = 16  # slots that share a prompt slot
# The smallest sizes of the cache and of a prefill, in columns; larger ones are buckets above them.
CACHE_COLUMNS = 128
PREFILL_COLUMNS = 32
# Maximum number of prompt tokens, with padding, that one admission computes on a shard (but at least one prompt).
PREFILL_TOKENS = 16_384
# Prompts are computed in pieces: maximum numbers of tokens and of attention scores, and minimum number of columns.
PIECE_TOKENS = 4096
PIECE_SCORES = 1 << 28
PIECE_COLUMNS = 64
# The fraction of the free memory that keys and values take by default.
FREE_FRAC = 0.8
# The fraction of `max_tokens` that completions are expected to take.
EXPECTED_FRAC = 0.5


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
        return self.num_prompt_slots * self.num_prompt_columns + self.num_slots * self.num_columns

    @property
    def max_prompts(self) -> int:
        """Maximum number of prompts that one admission computes."""
        return min(self.num_prompt_slots, max_prompts(self.num_prompt_columns))


@dataclass(frozen=True)
class Plan:
    """The limits of each shard.

    Attributes:
        max_tokens: Maximum number of tokens whose keys and values exist at once.
        num_layers: Number of layers of the model.
        max_slots: Maximum number of completions decoded at once.
    """

    max_tokens: int
    num_layers: int
    max_slots: int

    def planned_tokens(self, shape: CacheShape) -> int:
        """Returns the maximum number of tokens whose keys and values exist at once under this shape."""
        moved = -(-shape.num_tokens // self.num_layers)
        return shape.num_tokens + moved + shape.max_prompts * shape.num_prompt_columns

    def allows(self, shape: CacheShape) -> bool:
        """Returns whether this shape is within the budget."""
        return self.planned_tokens(shape) <= self.max_tokens

    def smallest_shape(self, longest: tuple[int, int]) -> CacheShape:
        """Returns the shape for one sequence with at most these numbers of prompt and completion tokens."""
        prompt_columns, columns = prefill_columns(longest[0]), bucket(longest[1], CACHE_COLUMNS)
        return CacheShape(1, 1, prompt_columns, columns)

    def check(self, longest: tuple[int, int]) -> None:
        """Refuses sequences that can never run.

        Args:
            longest: Maximum numbers of tokens of a prompt and of a completion.

        Raises:
            ValueError: A sequence of these lengths does not fit on a shard.
        """
        smallest = self.smallest_shape(longest)
        if not self.allows(smallest):
            raise ValueError(
                f"a completion of {longest[1]} tokens after a prompt of {longest[0]} tokens needs the keys and values "
                f"of {self.planned_tokens(smallest)} tokens on a device at once, and there is room for those of "
                f"{self.max_tokens}; lower max_tokens, shorten the prompts, or allow the cache more memory"
            )

    def first_shape(self, group_sizes: Iterable[int], num_shards: int, longest: tuple[int, int]) -> CacheShape:
        """Returns the shape to start with: as many slots as there is work and room for, at the expected lengths.

        Args:
            group_sizes: Number of sequences of each prompt.
            num_shards: Number of shards.
            longest: Maximum numbers of tokens of a prompt and of a completion.

        Raises:
            ValueError: A sequence of these lengths does not fit on a shard.
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
        """Returns an allowed shape with fewer slots: fewer prompt slots first, then fewer slots in the last one."""
        while not self.allows(shape) and shape.num_slots > 1:
            share = shape.share if shape.num_prompt_slots > 1 else shape.share // 2
            shape = replace(shape, num_slots=shape.num_slots // 2, share=share)
        return shape


def longest_columns(prompt: int, completion: int, chunk_steps: int) -> tuple[int, int]:
    """Returns the maximum numbers of columns that a prompt and a completion of this many tokens take."""
    return prompt - 1, completion + chunk_steps


def expected_columns(longest_completion: int) -> int:
    """Returns the number of columns that completions are expected to need, given the length of the longest."""
    return bucket(int(EXPECTED_FRAC * longest_completion), CACHE_COLUMNS)


def piece_columns(num_prompts: int, num_columns: int, num_heads: int) -> int:
    """Returns the number of columns of a piece of the prompts, so that scores do not exist for all columns at once.

    Args:
        num_prompts: Number of prompts that are computed together.
        num_columns: Number of columns of each.
        num_heads: Number of query heads of one device.
    """
    piece, scores = num_columns, num_prompts * num_heads * num_columns
    while piece > PIECE_COLUMNS and not piece % 16:
        if num_prompts * piece <= PIECE_TOKENS and scores * piece <= PIECE_SCORES:
            break
        piece //= 2
    return piece


def prefill_columns(num_tokens: int) -> int:
    """Returns the number of columns for prompts of this many tokens without their last one, which decoding feeds."""
    return bucket(num_tokens, PREFILL_COLUMNS)


def max_prompts(num_prompt_columns: int) -> int:
    """Returns the maximum number of prompts of one admission, a power of two."""
    return 1 << (max(1, PREFILL_TOKENS // num_prompt_columns).bit_length() - 1)


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


def _share(group_sizes: list[int], waits: bool) -> int:
    """Returns the number of sequences per prompt slot: a power of two that divides every group.

    A prompt slot is free again when its last sequence finishes. While others wait for that, fewer share one.
    """
    divisors = (size & -size for size in group_sizes)
    return min(*divisors, 2 if waits else MAX_SHARE, MAX_SHARE)
