"""Stop strings, which end a completion. Imports no jax."""

from collections.abc import Callable, Sequence

from groupax.data.tokenizer import REPLACEMENT

Decode = Callable[[Sequence[int]], str]
# Characters that may differ at the start of a text that is decoded from the middle of its tokens.
SPARE_CHARACTERS = 8


def find_stop(
    decode: Decode, tokens: Sequence[int], num_checked: int, stop: Sequence[str], min_tokens: int
) -> int | None:
    """Returns the number of tokens up to the end of the first stop string; None if there is none.

    A stop string may straddle tokens. Only one that ends after the text of the first `min_tokens` tokens counts. The
    result does not depend on how many tokens are checked together.

    Args:
        decode: Function that decodes tokens.
        tokens: Tokens of the completion so far.
        num_checked: Number of tokens that were checked before.
        stop: Stop strings.
        min_tokens: Number of tokens in which none counts.
    """
    first = max(num_checked, min_tokens) + 1
    if len(tokens) < first or not any(end in _recent_text(decode, tokens, first - 1, stop) for end in stop):
        return None
    exempt = exempt_length(decode, tokens, min_tokens)
    if _first_stop(decode(tokens), stop, exempt) is None:
        return None
    low, high = first, len(tokens)  # more tokens never remove a text, so bisection finds the fewest
    while low < high:
        middle = (low + high) // 2
        if _first_stop(decode(tokens[:middle]), stop, exempt) is None:
            low = middle + 1
        else:
            high = middle
    return low


def text_before_stop(text: str, stop: Sequence[str], exempt: int = 0) -> str:
    """Returns the text before the first stop string that ends after the first `exempt` characters."""
    return text[: _first_stop(text, stop, exempt)]


def exempt_length(decode: Decode, tokens: Sequence[int], min_tokens: int) -> int:
    """Returns the length of the text of the first `min_tokens` tokens, in which stop strings do not count."""
    return len(decode(tokens[:min_tokens]).rstrip(REPLACEMENT)) if min_tokens else 0


def _recent_text(decode: Decode, tokens: Sequence[int], num_checked: int, stop: Sequence[str]) -> str:
    """Returns the end of the text, with every stop string that ends after the tokens that were checked.

    Only this end is decoded, so that long completions are not decoded again and again.
    """
    needed = max(map(len, stop)) + SPARE_CHARACTERS
    num_before = needed
    while num_before < num_checked:
        if len(decode(tokens[num_checked - num_before : num_checked])) >= needed:
            return decode(tokens[num_checked - num_before :])
        num_before *= 2
    return decode(tokens)


def _first_stop(text: str, stop: Sequence[str], exempt: int) -> int | None:
    """Returns the start of the first stop string that ends after the exempt characters."""
    starts = [text.find(end, max(exempt - len(end) + 1, 0)) for end in stop]
    return min((start for start in starts if start >= 0), default=None)
