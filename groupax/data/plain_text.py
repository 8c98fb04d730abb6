"""Encoding of untrusted text within a template's text: it never becomes a control token. Imports no jax."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from groupax.data.tokenizer import encode_texts


class PlainText:
    """Encodes texts of a template that contain untrusted texts.

    Control tokens are the tokenizer's special tokens, and the other tokens that were added to its vocabulary unless
    they are words or spaces: `</tool_response>` is not special in Qwen's tokenizer, but ends a tool's result.

    The whole text is encoded at once, so that the tokens are those of the template's own rendering. Where an untrusted
    text has the characters of a control token, the text is cut after the first of them, and both sides are encoded on
    their own. This needs nothing of the tokenizer but its list of added tokens: `split_special_tokens=True` of
    transformers leaves added tokens that are not special as they are, and changes the state of a fast tokenizer that
    other threads use.

    Args:
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        chosen = {index: token for index, token in added.items() if token.special or _is_markup(token.content)}
        self.special_ids = frozenset(index for index, token in chosen.items() if token.special)
        self.control_ids = np.asarray(sorted(chosen), np.int32)
        self._look_alikes = [token.content for token in chosen.values() if len(token.content) > 1]

    def encode(self, parts: Sequence[str], contents: Sequence[str], control: np.ndarray) -> np.ndarray:
        """Returns the token ids of alternating texts of a template and untrusted texts.

        Args:
            parts: Texts of the template, one more than `contents`.
            contents: Untrusted texts.
            control: Control tokens of the template's texts, in order.
        """
        pieces = [piece for pair in zip(parts, contents, strict=False) for piece in pair] + [parts[-1]]
        text = "".join(pieces)
        edges = np.cumsum([0, *map(len, pieces)])
        spans = [(int(edges[2 * index + 1]), int(edges[2 * index + 2])) for index in range(len(contents))]
        ids = self._encode_cut(text, {cut for span in spans for cut in self._cuts(text, *span)})
        if np.array_equal(self.control_of(ids), control):
            return ids
        # the tokenizer normalizes some characters to those of a control token
        return self._encode_cut(text, {cut for start, end in spans for cut in range(start, end + 1)})

    def control_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the control tokens among token ids."""
        return ids[np.isin(ids, self.control_ids)]

    def _cuts(self, text: str, start: int, end: int) -> Iterator[int]:
        """Yields a place within each look-alike of a control token that overlaps the untrusted `text[start:end]`."""
        for look_alike in self._look_alikes:
            first, last = max(start - len(look_alike) + 1, 0), end + len(look_alike) - 1
            while (first := text.find(look_alike, first, last)) >= 0:
                yield max(first + 1, start)
                first += 1

    def _encode_cut(self, text: str, cuts: set[int]) -> np.ndarray:
        places = [0, *sorted(cuts), len(text)]
        texts = [text[start:end] for start, end in pairwise(places) if start < end]
        encoded = encode_texts(self.tokenizer, texts, [True] * len(texts))
        return np.concatenate([np.zeros(0, np.int32), *encoded])


def _is_markup(text: str) -> bool:
    return any(not character.isalnum() and not character.isspace() for character in text)
