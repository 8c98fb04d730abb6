"""The parts of an update: its rows by their part in the gradient, and tokens by advantage and ratio.

A row's share of the gradient is exact where `groupax replay --why` has computed it (`why/step_N.json`). Without it
there is an estimate from what the run has recorded of every token. For token t with probability p the gradient of its
log-prob by the logits has a norm of about 1 - p, and is multiplied with advantage and ratio:

    size of a row = weight sqrt(sum_t (A_t w_t (1 - p_t))^2)        share of a row ~ size / sum of sizes

where the weight is that of the row's tokens in the loss. What the model does between logits and weights is left out,
and so is whether rows pull in the same direction: an exact share may be negative, an estimate is not.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from groupax.core.storage.folders import read_file
from groupax.satellites.view.rollouts import floats, has_mask, list_lengths, opened, scalar_text
from groupax.satellites.view.runs import NotFoundError, Run
from groupax.satellites.view.token_values import LossBounds, loss_bounds, token_texts

SHOWN_ROWS, SHOWN_TOKENS = 20, 12
SHOWN_BYTES = 400  # of a completion
FACTS = ("reward", "loss", "grad_norm", "kl", "entropy", "learning_rate", "clip_ratio/region_mean")
COLUMNS = ("prompt_index", "sample_index", "advantage", "completion_ids", "trainer_logps", "policy_logps")
MAX_WHY_BYTES = 64 * 2**20
Exact = Mapping[tuple[int, int], Mapping[str, Any]]  # share and norm by prompt and sample index
PER_ROW = ("grpo", "sapo")  # losses in which all rows weigh the same, whatever their lengths


@dataclass(frozen=True, eq=False)
class Terms:
    """The rows of an update and its tokens with the largest terms, as a rollout log has them.

    Attributes:
        places: [B, 2] prompt and sample index of each row.
        advantages: [B] advantage.
        num_tokens: [B] number of tokens that the model sampled.
        estimates: [B] estimated share of the gradient.
        index: [B] index of the row in the log.
        tokens: The largest terms, with the row among these, the position, the id, the ratio and the log-prob.
    """

    places: np.ndarray
    advantages: np.ndarray
    num_tokens: np.ndarray
    estimates: np.ndarray
    index: np.ndarray
    tokens: list[tuple[int, int, int, float, float]]

    def place(self, row: int) -> dict[str, Any]:
        """Returns what identifies a row, and its advantage."""
        prompt, sample = self.places[row].tolist()
        return {"prompt_index": prompt, "sample_index": sample, "advantage": float(self.advantages[row])}


def why(run: Run, step: int) -> dict[str, Any]:
    """Returns what the update of a step was made of.

    Raises:
        NotFoundError: The step has neither metrics nor rollouts.
    """
    facts = {name: _around(run, name, step) for name in FACTS}
    facts = {name: each for name, each in facts.items() if each is not None}
    found = [each for each in run.diagnostics() if each["step"] == step]
    exact = exact_shares(run.path, step)
    rows: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    num_rows, fault = len(exact or ()), ""
    try:
        path = run.rollout_file(step)
    except NotFoundError:
        if not facts and not found and exact is None:
            raise
        fault = "The completions of this step were not kept."
        largest = sorted((exact or {}).items(), key=lambda item: -_size(item[1]))[:SHOWN_ROWS]
        rows = [{"prompt_index": prompt, "sample_index": sample, **each} for (prompt, sample), each in largest]
    else:
        with opened(path) as file:
            missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
            terms = _no_terms() if missing else read_terms(file, loss_bounds(run), _is_per_row(run))
            fault = f"Its rollout log has no {missing[0]}." if missing else ""
            rows, num_rows = _rows(file, terms, exact), max(num_rows, len(terms.places))
            tokens = _tokens(terms, run)
    folder = shlex.quote(str(run.path))
    return {
        "facts": facts,
        "findings": found,
        "rows": rows[:SHOWN_ROWS],
        "num_rows": num_rows,
        "is_exact": exact is not None,
        "tokens": tokens,
        "fault": fault,
        "commands": {
            "replay": f"groupax replay {folder} --step {step}",
            "why": f"groupax replay {folder} --step {step} --why",
        },
    }


def exact_shares(folder: Path, step: int) -> Exact | None:
    """Returns what `groupax replay --why` has computed of a step, by prompt and sample index; None if it has not."""
    path = folder / "why" / f"step_{step:06d}.json"
    try:
        rows = json.loads(read_file(path, MAX_WHY_BYTES))["rows"]
        return {
            (int(row["prompt_index"]), int(row["sample_index"])): {
                "share": _float(row["share"]),
                "norm": _float(row["norm"]),
            }
            for row in rows
        }
    except (ArithmeticError, OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def read_terms(file: Any, bounds: LossBounds, is_per_row: bool) -> Terms:
    """Returns the rows of an update and its largest terms, from the open rollout log of its step.

    All rows may weigh the same in the loss, whatever their lengths (`is_per_row`).
    """
    parts: list[tuple[np.ndarray, ...]] = []
    top: list[tuple[float, int, int, int, float, float]] = []
    masked, num_before, num_read = has_mask(file.schema_arrow), 0, 0
    columns = [*COLUMNS, *(["mask"] if masked else [])]
    for batch in file.iter_batches(batch_size=4096, columns=columns, use_threads=False):
        lengths = {name: list_lengths(batch.column(name)) for name in columns[3:]}
        counts = lengths["completion_ids"]
        is_trained = np.logical_and.reduce([each == counts for each in lengths.values()]) & (counts > 0)
        index = np.flatnonzero(is_trained) + num_read
        num_read += batch.num_rows
        batch, counts = batch.filter(pyarrow.array(is_trained)), counts[is_trained]
        advantages = floats(batch.column("advantage"))
        row_of = np.repeat(np.arange(len(counts)), counts)
        logps, policy, ids = (_flat(batch.column(name)) for name in ("trainer_logps", "policy_logps", "completion_ids"))
        ratios = np.exp(np.clip(logps - policy, -20.0, 20.0))
        of_token = advantages[row_of]
        sizes = np.abs(of_token * ratios) * -np.expm1(np.minimum(logps, 0.0))
        is_out = np.where(of_token > 0, ratios > bounds.high, ratios < bounds.low) | ~np.isfinite(sizes)
        is_out |= ~_flat(batch.column("mask")).astype(bool) if masked else False
        sizes[is_out] = 0.0
        sampled = np.bincount(row_of, _flat(batch.column("mask")), len(counts)) if masked else counts
        norms = np.sqrt(np.bincount(row_of, np.square(sizes), len(counts)))
        norms = norms / np.maximum(sampled, 1) if is_per_row else norms
        places = np.stack([floats(batch.column(name)) for name in COLUMNS[:2]], axis=1).astype(np.int64)
        firsts = np.cumsum([0, *counts])
        for at in np.argsort(-sizes)[:SHOWN_TOKENS].tolist():
            row = int(row_of[at])
            values = row + num_before, at - int(firsts[row]), int(ids[at]), float(ratios[at]), float(logps[at])
            top += [(float(sizes[at]), *values)] if sizes[at] > 0 else []
        top = sorted(top, key=lambda each: -each[0])[:SHOWN_TOKENS]
        num_before += len(counts)
        parts.append((places, advantages, sampled.astype(np.int64), norms, index))
    if not parts:
        return _no_terms()
    places, advantages, num_tokens, norms, index = (np.concatenate(each) for each in zip(*parts, strict=True))
    total = norms.sum()
    estimates = norms / total if total else norms
    return Terms(places, advantages, num_tokens, estimates, index, [each[1:] for each in top])


def _no_terms() -> Terms:
    nothing = np.zeros(0)
    return Terms(np.zeros((0, 2), np.int64), nothing, nothing, nothing, nothing, [])


def _rows(file: Any, terms: Terms, exact: Exact | None) -> list[dict[str, Any]]:
    """Returns the rows with the largest shares, exact ones if they are known, else estimates."""
    known = [None if exact is None else exact.get((prompt, sample)) for prompt, sample in terms.places.tolist()]
    keys = terms.estimates if exact is None else np.array([_size(each) for each in known])
    chosen = np.argsort(-keys, kind="stable")[:SHOWN_ROWS]
    texts = file.read(columns=["completion"], use_threads=False).column("completion") if len(chosen) else None
    return [
        {
            **terms.place(row),
            "num_tokens": int(terms.num_tokens[row]),
            "estimate": float(terms.estimates[row]),
            "preview": "" if texts is None else scalar_text(texts[int(terms.index[row])], SHOWN_BYTES)[0],
            **(known[row] or {}),
        }
        for row in chosen.tolist()
    ]


def _tokens(terms: Terms, run: Run) -> list[dict[str, Any]]:
    texts = token_texts(run.path / "tokenizer")
    return [
        {**terms.place(row), "token": at, "text": "".join(texts.pieces([token])), "ratio": ratio, "logp": logp}
        for row, at, token, ratio, logp in terms.tokens
    ]


def _flat(lists: Any) -> np.ndarray:
    return lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)


def _size(row: Mapping[str, Any] | None) -> float:
    if row is None:
        return 0.0
    return np.inf if row["share"] is None else abs(row["share"])


def _is_per_row(run: Run) -> bool:
    try:
        return run.config().get("loss_type") in PER_ROW
    except ValueError:
        return False


def _around(run: Run, name: str, step: int) -> Mapping[str, Any] | None:
    """Returns a metric of a step and its median over up to ten earlier lines; None if the step does not have it."""
    steps, values = run.series(name)
    at = np.flatnonzero(steps == step)
    if not at.size:
        return None
    earlier = values[max(0, at[-1] - 10) : at[-1]]
    earlier = earlier[np.isfinite(earlier)]
    return {"value": float(values[at[-1]]), "before": float(np.median(earlier)) if earlier.size else None}


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
