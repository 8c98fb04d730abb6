"""The values of tokens in a step's rollouts: log-probs, entropies and ratios."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from groupax.view.arrow import has_mask, list_values
from groupax.view.runs import NotFoundError

PUSH = "advantage x ratio"
TURN_ADVANTAGES = "turn_advantages"
SHOWN_TOKENS = 1_500  # of a completion, until all its tokens are requested


def token_channels(path: Path) -> dict[str, dict[str, str]]:
    """Returns the values that tokens can be shaded by, by name.

    Each has a `kind` (logp, entropy, ratio, push or value), its `column`, and for a ratio the column of the denominator
    in `over`. A push is advantage x ratio, what the gradient of a token's log-prob is multiplied with.
    """
    with pyarrow.parquet.ParquetFile(path) as file:
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
    whole = "advantage" in schema.names and TURN_ADVANTAGES not in schema.names  # of turns, it is that of the first one
    if whole and {"policy_logps", "trainer_logps"} <= set(names):
        channels[PUSH] = {"kind": "push", "column": "trainer_logps", "over": "policy_logps"}
    order = ("logp", "entropy", "push", "ratio", "value")
    return dict(sorted(channels.items(), key=lambda item: (order.index(item[1]["kind"]), item[0] != "policy_logps")))


def token_values(
    path: Path, prompt_index: int, channel: str, sample: int | None = None, clip: tuple[float, float] | None = None
) -> dict[int, dict[str, Any]]:
    """Returns the ids and values of the tokens of a group, by sample index.

    `length` is the number of all tokens. The environment's have no value; where there are any, `sampled` tells which
    tokens the model sampled. A token whose ratio is clipped has no gradient, so that its push is 0.

    Args:
        path: Path of the step's rollout log.
        prompt_index: Index of the group's prompt.
        channel: Name in `token_channels`.
        sample: Sample index of a single completion to return in full; None for the first `SHOWN_TOKENS` tokens of all.
        clip: Bounds of the ratio in the loss; None if it does not clip tokens.

    Raises:
        NotFoundError: The channel does not exist.
    """
    channels = token_channels(path)
    if channel not in channels:
        raise NotFoundError(f"{path.name} has no {channel!r} per token; it has {', '.join(channels) or 'nothing'}")
    column, over = channels[channel]["column"], channels[channel]["over"]
    is_push = channels[channel]["kind"] == "push"
    columns = ["prompt_index", "sample_index", "completion_ids", column, *([over] if over else [])]
    columns += ["advantage"] if is_push else []
    limit = None if sample is not None else SHOWN_TOKENS
    found: dict[int, dict[str, Any]] = {}
    with pyarrow.parquet.ParquetFile(path) as file:
        masked = has_mask(file.schema_arrow)
        columns += ["mask"] if masked else []
        for batch in file.iter_batches(batch_size=64, columns=columns, use_threads=False):
            rows = np.flatnonzero(np.asarray(batch.column("prompt_index")) == prompt_index)
            for row in rows.tolist():
                sample_index = batch.column("sample_index")[row].as_py()
                if sample is not None and sample_index != sample:
                    continue
                all_ids = list_values(batch.column("completion_ids")[row])
                ids, num_ids = all_ids[:limit].astype(int), len(all_ids)
                values = _token_array(batch.column(column)[row], len(ids))
                if over:
                    with np.errstate(over="ignore"):
                        values = np.exp(values - _token_array(batch.column(over)[row], len(ids)))
                if is_push:
                    values = _push(values, batch.column("advantage")[row].as_py(), clip)
                found[sample_index] = {"ids": ids.tolist(), "length": num_ids}
                if masked:
                    sampled = _token_array(batch.column("mask")[row], len(ids)) != 0
                    values[~sampled] = np.nan
                    found[sample_index]["sampled"] = sampled.tolist()
                found[sample_index]["values"] = np.round(values, 5).tolist()
    return found


def _push(ratios: np.ndarray, advantage: float | None, clip: tuple[float, float] | None) -> np.ndarray:
    """Returns advantage x ratio, 0 where the clipped surrogate is constant (arXiv:1707.06347, eq. 7)."""
    if advantage is None:
        return np.full(len(ratios), np.nan)
    low, high = clip or (-np.inf, np.inf)
    is_clipped = ratios > high if advantage > 0 else ratios < low
    return np.where(is_clipped, 0.0, advantage * ratios)


def _kind(name: str) -> str:
    for kind in ("logp", "entrop", "ratio"):
        if kind in name:
            return "entropy" if kind == "entrop" else kind
    return "value"


def _token_array(scalar: Any, num_tokens: int) -> np.ndarray:
    """Returns a list as [num_tokens] float64, NaN where it has no value; a row may be null."""
    values = list_values(scalar)[:num_tokens].astype(np.float64)
    return np.concatenate([values, np.full(num_tokens - len(values), np.nan)])


def _is_list(kind: Any) -> bool:
    return pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
