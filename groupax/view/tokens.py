"""Texts of single tokens, decoded with the run's tokenizer."""

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

MAX_TOKENS_PER_CHARACTER = 8


class TokenTexts:
    """The tokenizer of a run.

    Args:
        folder: Folder `tokenizer/` of the run.

    Attributes:
        fault: Reason why token ids are shown instead of texts; empty if texts are shown.
    """

    def __init__(self, folder: Path) -> None:
        self.fault = ""
        self._tokenizer: Any = None
        path = folder / "tokenizer.json"
        if not path.is_file():
            self.fault = f"the run has no {path.parent.name}/{path.name}, so token ids are shown instead of texts"
            return
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (the library raises nothing more specific for a damaged file)
            self.fault = f"{path.parent.name}/{path.name} cannot be read ({error}), so token ids are shown"

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds; a character of several tokens belongs to the last of them."""
        if self._tokenizer is None:
            return [f"⟨{number}⟩" for number in ids]
        pieces, pending, before = [], [], []
        for number in ids:
            pending.append(number)
            prefix = self._decode(before)
            text = self._decode([*before, *pending])
            if text.endswith("\ufffd") and len(pending) < MAX_TOKENS_PER_CHARACTER:
                pieces.append("")
                continue
            pieces.append(text[len(prefix) :] if text.startswith(prefix) else self._decode(pending))
            before, pending = pending[-1:], []
        if pending:
            pieces[-1] = self._decode(pending)
        return pieces

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            return self._tokenizer.decode(list(ids), skip_special_tokens=False) if ids else ""
        except (OverflowError, TypeError):
            return "".join(f"⟨{number}⟩" for number in ids)


_loading = threading.Lock()


def token_texts(folder: Path) -> TokenTexts:
    """Returns the tokenizer in a folder, which is cached until its file changes."""
    try:
        version = (folder / "tokenizer.json").stat().st_mtime_ns
    except OSError:
        version = 0
    with _loading:
        return _load(folder, version)


@lru_cache(maxsize=4)
def _load(folder: Path, version: int) -> TokenTexts:  # noqa: ARG001
    return TokenTexts(folder)
