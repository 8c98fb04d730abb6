"""Text of a completion that still grows. Imports no jax."""

from collections.abc import Callable, Sequence

from groupax.data.tokenizer import REPLACEMENT
from groupax.engine.stop_strings import text_before_stop


class TextStream:
    """The certain part of a text: what is told of it is never taken back.

    Held back are characters whose bytes are not all there, and what may be the beginning of a stop text.

    Args:
        decode: tokens to text.
        stop: texts that end it.
        context: the tokens that it stands behind (see `tokenizer.context_tokens`).
        min_tokens: of the completion; a stop text counts only if it ends after them.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str],
        context: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._decode, self._stop = decode, stop
        self._num_exempt, self._exempt = min_tokens, 0  # tokens that are still to come, and characters
        self._tokens = list(context)
        # a token's text may depend on the last one that has any: decode some tokens twice
        self._before, self._read = 0, len(self._tokens)
        self._text, self._num_told = "", 0

    def add(self, tokens: Sequence[int]) -> str:
        """More tokens; returns the text that has become certain."""
        if self._num_exempt > 0:
            early, tokens = tokens[: self._num_exempt], tokens[self._num_exempt :]
            self._num_exempt -= len(early)
            self._read_on(early)
            self._exempt = len(self._text)
        self._read_on(tokens)
        return self._told_up_to(self._certain())

    def _read_on(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        earlier = self._decode(self._tokens[self._before : self._read])
        both = self._decode(self._tokens[self._before :])
        if both.endswith(REPLACEMENT):
            return
        self._text += both[len(earlier) :]
        if len(both) > len(earlier):
            self._before = self._read
        self._read = len(self._tokens)

    def end(self, text: str) -> str:
        """The rest, if this is the whole text."""
        return self._told_up_to(text)

    def _told_up_to(self, text: str) -> str:
        new = text[self._num_told :]
        self._num_told = max(self._num_told, len(text))
        return new

    def _certain(self) -> str:
        text = text_before_stop(self._text, self._stop, self._exempt)
        held = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), held, -1):
                if text.endswith(stop[:length]):
                    held = length
                    break
        return text[: len(text) - held]
