"""Stop texts: where a completion ends because of what it says. Imports no jax."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def find_stop(
    decode: Decode, tokens: Sequence[int], num_checked: int, stop: Sequence[str], min_tokens: int
) -> int | None:
    """How many tokens a completion keeps: the fewest whose text has one of the stop texts; None if none has.

    A stop text may straddle tokens. The result does not depend on how many tokens are looked at together.

    Args:
        decode: tokens to text.
        tokens: of the completion so far.
        num_checked: how many of them were looked at before.
        stop: texts that end it.
        min_tokens: it keeps at least as many.
    """
    first = max(num_checked + 1, min_tokens, 1)
    if len(tokens) < first or not _has_any(decode(tokens), stop):
        return None
    low, high = first, len(tokens)  # more tokens never take a text away again, so halving finds the fewest
    while low < high:
        middle = (low + high) // 2
        if _has_any(decode(tokens[:middle]), stop):
            high = middle
        else:
            low = middle + 1
    return low


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop text in it."""
    ends = [text.find(end) for end in stop if end in text]
    return text[: min(ends)] if ends else text


def _has_any(text: str, stop: Sequence[str]) -> bool:
    return any(end in text for end in stop)
