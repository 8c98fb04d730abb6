"""The values of tokens in a step's rollouts: log-probs, entropies and ratios."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from groupax.view.arrow import has_mask, list_values
from groupax.view.runs import NotFoundError

PUSH = "advantage x ratio"
TURN_ADVANTAGES, TURNS = "turn_advantages", "turns"
SHOWN_TOKENS = 1_500  # of a completion, until all its tokens are requested


@dataclass(frozen=True)
class LossBounds:
    """The tokens that a loss gives no gradient, besides those that the model did not sample.

    Attributes:
        low, high: Bounds of the ratio where the loss clips it for negative and for positive advantages.
        delta: Upper bound of the ratio for negative advantages.
        masked_ends: Finish reasons of the completions that the loss leaves out.
    """

    low: float = -np.inf
    high: float = np.inf
    delta: float = np.inf
    masked_ends: Collection[str] = ()


NO_BOUNDS = LossBounds()


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
    has_advantages = "advantage" in schema.names and (TURN_ADVANTAGES not in schema.names or TURNS in schema.names)
    if has_advantages and {"policy_logps", "trainer_logps"} <= set(names):
        channels[PUSH] = {"kind": "push", "column": "trainer_logps", "over": "policy_logps"}
    order = ("logp", "entropy", "push", "ratio", "value")
    return dict(sorted(channels.items(), key=lambda item: (order.index(item[1]["kind"]), item[0] != "policy_logps")))


def token_values(
    path: Path, prompt_index: int, channel: str, sample: int | None = None, bounds: LossBounds = NO_BOUNDS
) -> dict[int, dict[str, Any]]:
    """Returns the ids and values of the tokens of a group, by sample index.

    `length` is the number of all tokens. The environment's have no value; where there are any, `sampled` tells which
    tokens the model sampled. A token that is clipped or masked has no gradient, so that its push is 0; `dropped` names
    the reason, and is None for the others.

    Args:
        path: Path of the step's rollout log.
        prompt_index: Index of the group's prompt.
        channel: Name in `token_channels`.
        sample: Sample index of a single completion to return in full; None for the first `SHOWN_TOKENS` tokens of all.
        bounds: The tokens without a gradient.

    Raises:
        NotFoundError: The channel does not exist.
    """
    channels = token_channels(path)
    if channel not in channels:
        raise NotFoundError(f"{path.name} has no {channel!r} per token; it has {', '.join(channels) or 'nothing'}")
    column, over = channels[channel]["column"], channels[channel]["over"]
    is_push = channels[channel]["kind"] == "push"
    columns = ["prompt_index", "sample_index", "completion_ids", column, *([over] if over else [])]
    limit = None if sample is not None else SHOWN_TOKENS
    found: dict[int, dict[str, Any]] = {}
    with pyarrow.parquet.ParquetFile(path) as file:
        masked = has_mask(file.schema_arrow)
        columns += ["mask"] if masked else []
        pushing = ("advantage", TURN_ADVANTAGES, TURNS, "finish_reason") if is_push else ()
        columns += [name for name in pushing if name in file.schema_arrow.names]
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
                found[sample_index] = {"ids": ids.tolist(), "length": num_ids}
                if is_push:
                    record = {name: batch.column(name)[row].as_py() for name in pushing if name in columns}
                    values, found[sample_index]["dropped"] = pushes(values, record, bounds)
                if masked:
                    sampled = _token_array(batch.column("mask")[row], len(ids)) != 0
                    values[~sampled] = np.nan
                    found[sample_index]["sampled"] = sampled.tolist()
                found[sample_index]["values"] = np.round(values, 5).tolist()
    return found


def pushes(ratios: np.ndarray, record: Mapping[str, Any], bounds: LossBounds) -> tuple[np.ndarray, list[str | None]]:
    """Returns [T] advantage x ratio, and for the tokens that the loss gives no gradient, whose push is 0, the reason.

    Args:
        ratios: [T] ratio of each token.
        record: `advantage`, `finish_reason` and for turns with their own advantages `turn_advantages` and `turns`.
        bounds: The tokens without a gradient. They are clipped where the surrogate is constant (arXiv:1707.06347, eq.
            7; `groupax.objective.losses.clipped_surrogate`).
    """
    advantages = _token_advantages(len(ratios), record)
    if record.get("finish_reason") in bounds.masked_ends:
        return np.zeros(len(ratios)), ["masked"] * len(ratios)
    is_clipped = (advantages < 0) & ((ratios < bounds.low) | (ratios > bounds.delta))
    is_clipped |= (advantages > 0) & (ratios > bounds.high)
    dropped = ["clipped" if clipped else None for clipped in is_clipped.tolist()]
    return np.where(is_clipped, 0.0, advantages * ratios), dropped


def _token_advantages(num_tokens: int, record: Mapping[str, Any]) -> np.ndarray:
    """Returns [num_tokens] the advantage of each token: that of its turn, or else of the completion; NaN if unknown."""
    own = record.get(TURN_ADVANTAGES)
    if own is None:
        return np.full(num_tokens, np.nan if record["advantage"] is None else record["advantage"])
    advantages = np.full(num_tokens, np.nan)
    try:
        for turn, advantage in zip(json.loads(record[TURNS]), own, strict=True):
            advantages[int(turn["start"]) : int(turn["end"])] = advantage
    except (KeyError, RecursionError, TypeError, ValueError):
        return np.full(num_tokens, np.nan)
    return advantages


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
