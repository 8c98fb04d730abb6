"""Stop texts: where a completion ends because of what it says. Imports no jax."""

from collections.abc import Callable, Sequence

from groupax.data.tokenizer import REPLACEMENT

Decode = Callable[[Sequence[int]], str]
# Characters that may differ at the beginning of a text that is decoded from the middle of its tokens.
SPARE_CHARACTERS = 8


def find_stop(
    decode: Decode, tokens: Sequence[int], num_checked: int, stop: Sequence[str], min_tokens: int
) -> int | None:
    """Returns how many tokens a completion keeps: the fewest whose text has a stop text; None if there is none.

    A stop text may straddle tokens. Only one that ends after the text of the first `min_tokens` tokens counts. The
    result does not depend on how many tokens are looked at together.

    Args:
        decode: tokens to text.
        tokens: of the completion so far.
        num_checked: how many of them were looked at before.
        stop: texts that end it.
        min_tokens: so many tokens are exempt.
    """
    first = max(num_checked, min_tokens) + 1
    if len(tokens) < first or not any(end in _recent_text(decode, tokens, first - 1, stop) for end in stop):
        return None
    exempt = exempt_length(decode, tokens, min_tokens)
    if _first_stop(decode(tokens), stop, exempt) is None:
        return None
    low, high = first, len(tokens)  # more tokens never take a text away again, so halving finds the fewest
    while low < high:
        middle = (low + high) // 2
        if _first_stop(decode(tokens[:middle]), stop, exempt) is None:
            low = middle + 1
        else:
            high = middle
    return low


def text_before_stop(text: str, stop: Sequence[str], exempt: int = 0) -> str:
    """Returns the text up to the first stop text that ends after its first `exempt` characters."""
    return text[: _first_stop(text, stop, exempt)]


def exempt_length(decode: Decode, tokens: Sequence[int], min_tokens: int) -> int:
    """Returns how many characters the first `min_tokens` tokens make, in which stop texts do not count."""
    return len(decode(tokens[:min_tokens]).rstrip(REPLACEMENT)) if min_tokens else 0


def _recent_text(decode: Decode, tokens: Sequence[int], num_checked: int, stop: Sequence[str]) -> str:
    """Returns the end of the text, in which every stop text lies that ends behind the tokens that were checked.

    It is decoded by itself, so that long completions are not decoded as a whole again and again.
    """
    needed = max(map(len, stop)) + SPARE_CHARACTERS
    num_before = needed
    while num_before < num_checked:
        if len(decode(tokens[num_checked - num_before : num_checked])) >= needed:
            return decode(tokens[num_checked - num_before :])
        num_before *= 2
    return decode(tokens)


def _first_stop(text: str, stop: Sequence[str], exempt: int) -> int | None:
    """Where the first stop text begins that ends after the exempt characters."""
    starts = [text.find(end, max(exempt - len(end) + 1, 0)) for end in stop]
    return min((start for start in starts if start >= 0), default=None)
