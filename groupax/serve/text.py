"""The text of a completion that is still being sampled. Imports no jax."""

from collections.abc import Callable, Sequence

from groupax.data.tokenizer import REPLACEMENT
from groupax.engine.sequence import text_before_stop


class TextStream:
    """Decodes tokens incrementally into text that later tokens cannot change.

    It holds back characters with missing bytes, and what may be the start of a stop string.

    Args:
        decode: Decodes tokens to text.
        stop: Stop strings.
        context: The preceding tokens (see `tokenizer.context_tokens`).
        min_tokens: Number of tokens in which a stop string may not end.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str],
        context: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._decode, self._stop = decode, stop
        self._num_exempt_tokens, self._num_exempt_characters = min_tokens, 0  # the tokens are those still to come
        self._tokens = list(context)
        # A token's text may depend on the last token with a text: tokens from `_start` on are decoded twice.
        self._start, self._num_decoded = 0, len(self._tokens)
        self._text, self._num_returned = "", 0

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the text that has become final."""
        if self._num_exempt_tokens > 0:
            early, tokens = tokens[: self._num_exempt_tokens], tokens[self._num_exempt_tokens :]
            self._num_exempt_tokens -= len(early)
            self._decode_more(early)
            self._num_exempt_characters = len(self._text)
        self._decode_more(tokens)
        return self._new_part(self._final_text())

    def end(self, text: str) -> str:
        """Returns the rest of the whole text."""
        return self._new_part(text)

    def _decode_more(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        earlier = self._decode(self._tokens[self._start : self._num_decoded])
        both = self._decode(self._tokens[self._start :])
        if both.endswith(REPLACEMENT):
            return
        self._text += both[len(earlier) :]
        if len(both) > len(earlier):
            self._start = self._num_decoded
        self._num_decoded = len(self._tokens)

    def _new_part(self, text: str) -> str:
        new = text[self._num_returned :]
        self._num_returned = max(self._num_returned, len(text))
        return new

    def _final_text(self) -> str:
        text = text_before_stop(self._text, self._stop, self._num_exempt_characters)
        first_held = len(text)
        for stop in self._stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < first_held:
                if stop.startswith(text[start:]):
                    first_held = start
                start = text.find(stop[0], start + 1)
        return text[:first_held]
