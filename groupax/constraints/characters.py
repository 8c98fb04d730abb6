"""Sets of characters, as ranges of code points, and their encodings in UTF-8. Imports nothing."""

from collections.abc import Iterable, Iterator

LAST = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]  # sorted, apart from each other, ends included
ByteRanges = tuple[tuple[int, int], ...]  # the range of each byte of an encoding
_SURROGATES = 0xD800, 0xDFFF
_LENGTHS = (0x7F, 0x7FF, 0xFFFF, LAST)  # last code points of 1, 2, 3 and 4 bytes


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the sorted ranges of everything that is in one of these."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Returns the ranges of all other characters."""
    starts = [0, *(high + 1 for _, high in ranges)]
    ends = [*(low - 1 for low, _ in ranges), LAST]
    return tuple((low, high) for low, high in zip(starts, ends, strict=True) if low <= high)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Returns the ranges of what is in both."""
    return complement(union([*complement(one), *complement(other)]))


def encodings(ranges: Ranges) -> Iterator[ByteRanges]:
    """Yields ranges of bytes, position by position, which together are the encodings of all characters in UTF-8."""
    for low, high in intersection(ranges, complement((_SURROGATES,))):
        first = low
        for last in _LENGTHS:
            if first <= min(high, last):
                yield from _of_one_length(first, min(high, last))
                first = last + 1


def _of_one_length(low: int, high: int) -> Iterator[ByteRanges]:
    """Yields the encodings of a range whose characters all have as many bytes."""
    for bits in (6, 12, 18):  # of the bytes after the one that differs
        block = (1 << bits) - 1
        if low | block < high | block and high > block:
            if low & block:
                yield from _of_one_length(low, low | block)
                yield from _of_one_length((low | block) + 1, high)
                return
            if high & block != block:
                yield from _of_one_length(low, (high & ~block) - 1)
                yield from _of_one_length(high & ~block, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
