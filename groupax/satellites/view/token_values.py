"""The texts of tokens in a step's rollouts, and their values: log-probs, entropies and ratios."""

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from groupax.satellites.view.rollouts import has_mask, opened
from groupax.satellites.view.runs import NotFoundError

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


SHOWN_TOKENS = 1_500  # of a completion, until all its tokens are requested


def token_channels(path: Path) -> dict[str, dict[str, str]]:
    """Returns the values that tokens can be shaded by, by name.

    Each has a `kind` (logp, entropy, ratio or value), its `column`, and for a ratio the column of the denominator in
    `over`.
    """
    with opened(path) as file:
        schema = file.schema_arrow
    if "completion_ids" not in schema.names:
        return {}
    names = [item.name for item in schema if _is_list(item.type) and pyarrow.types.is_floating(item.type.value_type)]
    channels = {name: {"kind": _kind(name), "column": name, "over": ""} for name in names}
    if "policy_logps" in names:
        for name in names:
            if name.endswith("_logps") and name != "policy_logps":
                ratio = f"ratio {name.removesuffix('_logps')} / policy"
                channels[ratio] = {"kind": "ratio", "column": name, "over": "policy_logps"}
    order = ("logp", "entropy", "ratio", "value")
    return dict(sorted(channels.items(), key=lambda item: (order.index(item[1]["kind"]), item[0] != "policy_logps")))


def token_values(path: Path, prompt_index: int, channel: str, sample: int | None = None) -> dict[int, dict[str, Any]]:
    """Returns the ids and values of the tokens of a group, by sample index.

    `length` is the number of all tokens. The environment's have no value; where there are any, `sampled` tells which
    tokens the model sampled.

    Args:
        path: Path of the step's rollout log.
        prompt_index: Index of the group's prompt.
        channel: Name in `token_channels`.
        sample: Sample index of a single completion to return in full; None for the first `SHOWN_TOKENS` tokens of all.

    Raises:
        NotFoundError: The channel does not exist.
    """
    channels = token_channels(path)
    if channel not in channels:
        raise NotFoundError(f"{path.name} has no {channel!r} per token; it has {', '.join(channels) or 'nothing'}")
    column, over = channels[channel]["column"], channels[channel]["over"]
    columns = ["prompt_index", "sample_index", "completion_ids", column, *([over] if over else [])]
    limit = None if sample is not None else SHOWN_TOKENS
    found: dict[int, dict[str, Any]] = {}
    with opened(path) as file:
        masked = has_mask(file.schema_arrow)
        columns += ["mask"] if masked else []
        for batch in file.iter_batches(batch_size=64, columns=columns, use_threads=False):
            rows = np.flatnonzero(np.asarray(batch.column("prompt_index")) == prompt_index)
            for row in rows.tolist():
                sample_index = batch.column("sample_index")[row].as_py()
                if sample is not None and sample_index != sample:
                    continue
                all_ids = _values(batch.column("completion_ids")[row])
                ids, num_ids = all_ids[:limit].astype(int), len(all_ids)
                values = _token_array(batch.column(column)[row], len(ids))
                if over:
                    values = np.exp(values - _token_array(batch.column(over)[row], len(ids)))
                found[sample_index] = {"ids": ids.tolist(), "length": num_ids}
                if masked:
                    sampled = _token_array(batch.column("mask")[row], len(ids)) != 0
                    values[~sampled] = np.nan
                    found[sample_index]["sampled"] = sampled.tolist()
                found[sample_index]["values"] = np.round(values, 5).tolist()
    return found


def _kind(name: str) -> str:
    for kind in ("logp", "entrop", "ratio"):
        if kind in name:
            return "entropy" if kind == "entrop" else kind
    return "value"


def _token_array(scalar: Any, num_tokens: int) -> np.ndarray:
    """Returns a list as [num_tokens] float64, NaN where it has no value; a row may be null."""
    values = _values(scalar)[:num_tokens].astype(np.float64)
    return np.concatenate([values, np.full(num_tokens - len(values), np.nan)])


def _values(scalar: Any) -> np.ndarray:
    """Returns the values of a list scalar; empty for null."""
    values = scalar.values
    return np.zeros(0) if values is None else np.asarray(values.to_numpy(zero_copy_only=False))


def _is_list(kind: Any) -> bool:
    return pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
