"""The bytes that each token of a vocabulary stands for. Imports no jax."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SAMPLE = '{"a b": [1, -2.5e3, true],  "é": "\\n \u20ac\U0001f600"}'


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """Returns the bytes of each token; none for special tokens and for ids without a token.

    Args:
        tokenizer: Fast tokenizer of `transformers` whose tokens are bytes or pieces of text.
        vocab_size: Number of the model's tokens.

    Raises:
        ValueError: Text is not the concatenation of its tokens' bytes, as with WordPiece.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{_UNFIT} it is not one of the tokenizers library")
    decoder = json.loads(backend.to_str())["decoder"]
    has_byte_letters = any(part.get("type") == "ByteLevel" for part in _parts(decoder))
    added = tokenizer.added_tokens_decoder
    found = [b""] * vocab_size
    for index, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(min(vocab_size, len(tokenizer)))))):
        if index in added:
            found[index] = b"" if added[index].special else str(added[index].content).encode()
        elif token is not None:
            found[index] = _of_letters(token) if has_byte_letters else _of_piece(token)
    _check(tokenizer, found)
    return found


_UNFIT = "this tokenizer cannot be used with regex or json_schema:"
_LETTERS = [
    *range(33, 127),
    *range(161, 173),
    *range(174, 256),
]  # bytes that are written as the character of their code
_OTHERS = [byte for byte in range(256) if byte not in _LETTERS]
_BYTE_OF = {chr(byte): byte for byte in _LETTERS} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}


def _parts(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yields the steps of a decoder."""
    if isinstance(decoder, dict):
        yield decoder
        for each in decoder.get("decoders", []):
            yield from _parts(each)


def _of_letters(token: str) -> bytes:
    """Returns the bytes of a token that is written with a letter for each byte, as in GPT-2."""
    if all(letter in _BYTE_OF for letter in token):
        return bytes(_BYTE_OF[letter] for letter in token)
    return token.encode()


def _of_piece(token: str) -> bytes:
    """Returns the bytes of a piece of SentencePiece."""
    if match := _BYTE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode(errors="ignore")


def _check(tokenizer: Any, found: list[bytes]) -> None:
    ids = np.asarray(tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"])
    unknown = tokenizer.unk_token_id
    known = [index for index in ids.tolist() if index != unknown]
    text = b"".join(found[index] for index in known)
    decoded = tokenizer.decode(known, clean_up_tokenization_spaces=False).encode()
    if text.lstrip(b" ") != decoded.lstrip(b" "):
        raise ValueError(f"{_UNFIT} its tokens spell {text!r}, and it decodes them to {decoded!r}")
